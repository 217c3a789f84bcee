# cuBLASLt and cuDNN on host memory, opened at run time as the real ones are, and their tests.
if(NOT OVERSPILL_HAS_CUDA_LIBRARIES)
  message(STATUS "Tests of cuBLASLt and cuDNN: skipped, without their headers")
  return()
endif()

add_library(fake_cublaslt SHARED fake_cublaslt.cpp)
file(GLOB FAKE_CUDNN_SOURCES CONFIGURE_DEPENDS fake_cudnn*.cpp)
add_library(fake_cudnn SHARED ${FAKE_CUDNN_SOURCES})
foreach(FAKE fake_cublaslt fake_cudnn)
  target_sources(${FAKE} PRIVATE ${CMAKE_SOURCE_DIR}/engine/base/error.cpp)
  target_include_directories(${FAKE} PRIVATE ${CMAKE_SOURCE_DIR} ${OPENBLAS_INCLUDE})
  target_include_directories(${FAKE} SYSTEM PRIVATE ${OVERSPILL_CUBLASLT_INCLUDE}
                             ${OVERSPILL_CUDNN_INCLUDE})
  target_link_libraries(${FAKE} PRIVATE fmt::fmt ${OPENBLAS_LIBRARY})
endforeach()

# The name under which cuDNN looks for the driver.
add_library(fake_driver SHARED fake_driver.cpp)
target_link_options(fake_driver PRIVATE -Wl,-soname,libcuda.so.1)
set_target_properties(fake_driver PROPERTIES NO_SONAME ON)

add_executable(overspill_cuda_library_tests gemm_test.cpp dnn_test.cpp attention_plan_test.cpp
               test_memory.cpp)
target_link_libraries(overspill_cuda_library_tests PRIVATE overspill_engine GTest::gtest_main)
target_compile_definitions(overspill_cuda_library_tests PRIVATE
  OVERSPILL_FAKE_CUBLASLT="$<TARGET_FILE:fake_cublaslt>"
  OVERSPILL_FAKE_CUDNN="$<TARGET_FILE:fake_cudnn>"
  OVERSPILL_FAKE_DRIVER="$<TARGET_FILE:fake_driver>")
add_dependencies(overspill_cuda_library_tests fake_cublaslt fake_cudnn fake_driver)
gtest_discover_tests(overspill_cuda_library_tests DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
