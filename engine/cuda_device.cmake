# GPUs as devices. CUDA's header is needed to build this; the runtime is opened at run time.
# OVERSPILL_HAS_CUDA_DEVICE: whether it is built; else files named no_cuda* say that it is not.
find_path(OVERSPILL_CUDA_INCLUDE cuda_runtime_api.h
          PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
file(GLOB CUDA_DEVICE_SOURCES CONFIGURE_DEPENDS offload/cuda_*.cpp engine/collective/cuda_*.cpp)
file(GLOB NO_CUDA_DEVICE_SOURCES CONFIGURE_DEPENDS offload/no_cuda*.cpp
     engine/collective/no_cuda*.cpp)
list(REMOVE_ITEM CUDA_DEVICE_SOURCES ${CUDA_MODEL_SOURCES} ${CUDA_LINKED_SOURCES})
list(REMOVE_ITEM NO_CUDA_DEVICE_SOURCES ${NO_CUDA_LINKED_SOURCES})
set(OVERSPILL_HAS_CUDA_DEVICE OFF)
if(OVERSPILL_CUDA_INCLUDE AND NOT "${OVERSPILL_CUDA}" STREQUAL "OFF")
  file(STRINGS ${OVERSPILL_CUDA_INCLUDE}/cuda_runtime_api.h CUDART_VERSION
       REGEX "^#define CUDART_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9]" "" CUDART_VERSION "${CUDART_VERSION}")
  if(CUDART_VERSION GREATER_EQUAL 13000)
    set(OVERSPILL_HAS_CUDA_DEVICE ON)
  endif()
endif()
if(OVERSPILL_HAS_CUDA_DEVICE)
  target_include_directories(overspill_engine SYSTEM PRIVATE ${OVERSPILL_CUDA_INCLUDE})
  set_source_files_properties(${NO_CUDA_DEVICE_SOURCES} PROPERTIES HEADER_FILE_ONLY ON)
else()
  set_source_files_properties(${CUDA_DEVICE_SOURCES} PROPERTIES HEADER_FILE_ONLY ON)
  message(STATUS "GPU device: not built (OVERSPILL_CUDA=${OVERSPILL_CUDA}, header of CUDA 13: "
          "${OVERSPILL_CUDA_INCLUDE})")
endif()
