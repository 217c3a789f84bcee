# The model on GPUs, a library beside the engine that calls it: over nvcc's kernels, over emulated
# ones in tests (targets with the property OVERSPILL_EMULATED_GPU), or, without either, refusing.
set(CUDA_MODEL_SOURCES engine/model/cuda_llama.cpp engine/model/cuda_state.cpp
    engine/model/cuda_attention_choice.cpp engine/collective/cuda_reduction_kernels.cpp)
set(CUDA_LINKED_SOURCES ${CMAKE_SOURCE_DIR}/offload/cuda_linked.cpp)
set(NO_CUDA_LINKED_SOURCES ${CMAKE_SOURCE_DIR}/offload/no_cuda_linked.cpp)
list(TRANSFORM CUDA_MODEL_SOURCES PREPEND ${CMAKE_SOURCE_DIR}/)
set(NO_CUDA_MODEL_SOURCES ${CMAKE_SOURCE_DIR}/engine/model/no_cuda_model.cpp)
list(REMOVE_ITEM ENGINE_SOURCES ${CUDA_MODEL_SOURCES} ${NO_CUDA_MODEL_SOURCES}
     ${CUDA_LINKED_SOURCES} ${NO_CUDA_LINKED_SOURCES})

function(overspill_add_gpu_model)
  if(OVERSPILL_HAS_CUDA AND OVERSPILL_HAS_CUDA_LIBRARIES AND OVERSPILL_HAS_CUDA_DEVICE)
    add_library(overspill_gpu_model STATIC ${CUDA_MODEL_SOURCES} ${CUDA_LINKED_SOURCES})
    target_link_libraries(overspill_gpu_model PRIVATE overspill_cuda)
  else()
    add_library(overspill_gpu_model STATIC ${NO_CUDA_MODEL_SOURCES} ${NO_CUDA_LINKED_SOURCES})
  endif()
  target_link_libraries(overspill_gpu_model PUBLIC overspill_engine)
  target_link_libraries(overspill_engine INTERFACE
    $<IF:$<BOOL:$<TARGET_PROPERTY:OVERSPILL_EMULATED_GPU>>,overspill_emulated_gpu_model,overspill_gpu_model>)
endfunction()
