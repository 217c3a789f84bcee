# The engine on an emulated GPU: its model over the emulated kernels, NVIDIA's libraries over their
# fakes, and the suites that every device must pass.
if(NOT OVERSPILL_HAS_CUDA_DEVICE OR NOT OVERSPILL_HAS_CUDA_LIBRARIES)
  message(STATUS "Training on an emulated GPU: skipped, without NVIDIA's headers")
  return()
endif()

add_library(overspill_emulated_gpu_model STATIC ${CUDA_MODEL_SOURCES} ${NO_CUDA_LINKED_SOURCES})
target_link_libraries(overspill_emulated_gpu_model PUBLIC overspill_emulated_kernels)

function(overspill_link_engine_tests target)
  set_target_properties(${target} PROPERTIES OVERSPILL_EMULATED_GPU ON)
  target_link_libraries(${target} PRIVATE overspill_device_suites overspill_c
                        overspill_emulated_gpu_model overspill_engine GTest::gtest)
  target_compile_definitions(${target} PRIVATE
    OVERSPILL_FAKE_CUDART="$<TARGET_FILE:fake_cudart>"
    OVERSPILL_FAKE_CUBLASLT="$<TARGET_FILE:fake_cublaslt>"
    OVERSPILL_FAKE_CUDNN="$<TARGET_FILE:fake_cudnn>"
    OVERSPILL_FAKE_NCCL="$<TARGET_FILE:fake_nccl>")
  add_dependencies(${target} fake_cudart fake_cublaslt fake_cudnn fake_nccl)
endfunction()

add_library(overspill_emulated_suites OBJECT engine_fault_test.cpp c_api_gpu_test.cpp
            c_api_gpu_fault_test.cpp)
target_compile_definitions(overspill_emulated_suites PRIVATE
  OVERSPILL_SOURCE_DIR="${CMAKE_SOURCE_DIR}" OVERSPILL_BINARY="$<TARGET_FILE:overspill>")
overspill_link_engine_tests(overspill_emulated_suites)
add_executable(overspill_cuda_engine_tests engine_main.cpp)
target_link_libraries(overspill_cuda_engine_tests PRIVATE overspill_emulated_suites)
overspill_link_engine_tests(overspill_cuda_engine_tests)
# What compares with the host, or is the host's alone, is left to overspill_tests. The program itself
# runs all suites; CI runs those that reach everything a GPU does.
set(EMULATED_SUITES
  GpuFault* PackedGolden* *PlacementContract* PlacementOfModes.UpdatedTwice* *OptimizerContract*
  ResumeContract.EveryStepBf16 ResumeContract.EveryStepWithUpdatesInTheBackward FrozenContract*
  *FrozenPlacement* AdafactorContract* TrafficContract* *ZeroStages.OneTwoAndFourRanksAgree*
  *ZeroStages.Bf16RanksAgree* *ZeroStages.PlacementChangesNothing/stage3
  *ZeroStages.PlacementChangesNothing/hybrid RanksTest.StagesGive* RanksTest.StopsAt* NonFinite*
  StatelessSgd* SharedData.Bf16Curve* CApi*)
list(JOIN EMULATED_SUITES ":" EMULATED_SUITES)
gtest_discover_tests(overspill_cuda_engine_tests TEST_PREFIX EmulatedGpu. DISCOVERY_TIMEOUT 60
                     TEST_FILTER "${EMULATED_SUITES}-NonFinite.TheCommand*:*UnifiedEquals*:CApiTrainer.SumsInPages*"
                     PROPERTIES TIMEOUT 400)
