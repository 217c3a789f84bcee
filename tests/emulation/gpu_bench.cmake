# The GPU's benchmark on emulated kernels and the fake runtime and libraries, with tiny sizes.
if(NOT OVERSPILL_HAS_CUDA_DEVICE OR NOT OVERSPILL_HAS_CUDA_LIBRARIES)
  message(STATUS "Tests of the GPU's benchmark: skipped, without CUDA's headers")
  return()
endif()

file(GLOB GPU_BENCH_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/bench/gpu/*.cpp)
list(REMOVE_ITEM GPU_BENCH_SOURCES ${CMAKE_SOURCE_DIR}/bench/gpu/main.cpp)
add_executable(overspill_gpu_bench_tests gpu_bench_test.cpp ${GPU_BENCH_SOURCES})
set_target_properties(overspill_gpu_bench_tests PROPERTIES OVERSPILL_EMULATED_GPU ON)
target_link_libraries(overspill_gpu_bench_tests PRIVATE overspill_emulated_gpu_model
                      GTest::gtest_main)
target_compile_definitions(overspill_gpu_bench_tests PRIVATE
  OVERSPILL_FAKE_CUDART="$<TARGET_FILE:fake_cudart>"
  OVERSPILL_FAKE_CUBLASLT="$<TARGET_FILE:fake_cublaslt>"
  OVERSPILL_FAKE_CUDNN="$<TARGET_FILE:fake_cudnn>")
add_dependencies(overspill_gpu_bench_tests fake_cudart fake_cublaslt fake_cudnn)
gtest_discover_tests(overspill_gpu_bench_tests DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
