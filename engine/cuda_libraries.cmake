# Host code over NVIDIA's cuBLASLt and cuDNN. It needs their headers to be built; the libraries are
# opened at run time. OVERSPILL_HAS_CUDA_LIBRARIES: whether it is built.
find_path(OVERSPILL_CUBLASLT_INCLUDE cublasLt.h HINTS ${OVERSPILL_CUDA_INCLUDE}
          PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
find_path(OVERSPILL_CUDNN_INCLUDE cudnn_graph.h HINTS ${OVERSPILL_CUDA_INCLUDE}
          PATHS ENV CUDNN_HOME ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
file(GLOB CUDA_LIBRARY_SOURCES CONFIGURE_DEPENDS engine/model/cuda_blas*.cpp
     engine/model/cuda_dnn*.cpp engine/model/cuda_gemm*.cpp)
if(OVERSPILL_CUBLASLT_INCLUDE AND OVERSPILL_CUDNN_INCLUDE)
  set(OVERSPILL_HAS_CUDA_LIBRARIES ON)
  target_include_directories(overspill_engine SYSTEM PUBLIC ${OVERSPILL_CUBLASLT_INCLUDE}
                             ${OVERSPILL_CUDNN_INCLUDE})
else()
  set(OVERSPILL_HAS_CUDA_LIBRARIES OFF)
  set_source_files_properties(${CUDA_LIBRARY_SOURCES} PROPERTIES HEADER_FILE_ONLY ON)
  message(STATUS "cuBLASLt and cuDNN: not built (headers: ${OVERSPILL_CUBLASLT_INCLUDE}, "
          "${OVERSPILL_CUDNN_INCLUDE})")
endif()
