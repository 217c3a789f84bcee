# The CUDA runtime on host memory, opened at run time as the real one is, and its own tests.
if(NOT OVERSPILL_HAS_CUDA_DEVICE)
  message(STATUS "Tests of GPU devices: skipped, without CUDA's header")
  return()
endif()

file(GLOB FAKE_CUDART_SOURCES CONFIGURE_DEPENDS fake_runtime*.cpp)
add_library(fake_cudart SHARED ${FAKE_CUDART_SOURCES})
target_include_directories(fake_cudart PUBLIC ${CMAKE_SOURCE_DIR})
target_include_directories(fake_cudart SYSTEM PUBLIC ${OVERSPILL_CUDA_INCLUDE})
target_link_libraries(fake_cudart PRIVATE Threads::Threads)
target_compile_definitions(overspill_tests PRIVATE
  OVERSPILL_FAKE_CUDART="$<TARGET_FILE:fake_cudart>")
add_dependencies(overspill_tests fake_cudart)

add_executable(overspill_cuda_runtime_tests runtime_test.cpp)
target_link_libraries(overspill_cuda_runtime_tests PRIVATE fake_cudart GTest::gtest_main)
gtest_discover_tests(overspill_cuda_runtime_tests DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
