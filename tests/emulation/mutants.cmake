# Deliberate mistakes in kernels, one per program: its tests must fail. A mutant is a copy of one
# source with one text replaced, found before the original by the emulated kernel's includes.
function(write_mutant name source from to)
  file(READ ${CMAKE_SOURCE_DIR}/${source} text)
  string(FIND "${text}" "${from}" first)
  string(FIND "${text}" "${from}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "mutant ${name}: not exactly one place in ${source} reads: ${from}")
  endif()
  string(REPLACE "${from}" "${to}" mutated "${text}")
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${source}
       CONTENT "${mutated}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${source})
endfunction()

function(expect_caught name filter)
  target_compile_options(mutant_${name} PRIVATE -w)
  add_test(NAME mutant.${name} COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:mutant_${name}>
           -DFILTER=${filter} -P ${CMAKE_CURRENT_SOURCE_DIR}/expect_failure.cmake)
  set_tests_properties(mutant.${name} PROPERTIES TIMEOUT 300)
endfunction()

function(add_mutant name source kernel filter from to)
  write_mutant(${name} ${source} "${from}" "${to}")
  add_executable(mutant_${name} cuda_${kernel}_emu.cpp)
  target_include_directories(mutant_${name} BEFORE PRIVATE
    ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name})
  # Its definitions come before the library's, whose object for the same kernels is not taken then.
  target_link_libraries(mutant_${name} PRIVATE overspill_kernel_tests overspill_emulated_kernels
                        GTest::gtest_main)
  expect_caught(${name} ${filter})
endfunction()

# Of the engine's own sources: whole runs on the emulated GPU must fail.
function(add_engine_mutant name source filter from to)
  if(NOT TARGET overspill_cuda_engine_tests)
    return()
  endif()
  write_mutant(${name} ${source} "${from}" "${to}")
  add_executable(mutant_${name} engine_main.cpp
                 ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${source})
  target_link_libraries(mutant_${name} PRIVATE overspill_emulated_suites)
  overspill_link_engine_tests(mutant_${name})
  expect_caught(${name} ${filter})
endfunction()

set(VECTOR engine/base/cuda_vector.h)
set(ELEMENTWISE engine/model/cuda_elementwise.cu)
set(ATTENTION engine/model/cuda_attention.cu)
set(NORM_TESTS *NormKernels*)
set(ELEMENTWISE_TESTS *ElementwiseKernels*)
set(ATTENTION_TESTS *AttentionKernels*)

# Missing barriers: reads before writes, and writes before reads.
add_mutant(sum_read_early ${VECTOR} norm ${NORM_TESTS}
  [=[  block_barrier();
  T sum = partial[0];]=] [=[  T sum = partial[0];]=])
add_mutant(sum_overwritten ${VECTOR} norm ${NORM_TESTS}
  [=[  block_barrier();  // the next call must not overwrite what is still read
]=] "")
add_mutant(narrow_unordered ${ELEMENTWISE} elementwise ${ELEMENTWISE_TESTS}
  [=[  block_barrier();
]=] "")
add_mutant(tile_overwritten ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[    share(p, weights);
    block_barrier();
    load_rows<kTile, kDim>(head_of(a.v]=] [=[    share(p, weights);
    load_rows<kTile, kDim>(head_of(a.v]=])
add_mutant(tile_read_early ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[    block_barrier();
    add_weighted<kDim>(weights, tile, sums);
    block_barrier();
  }
  const Head<T> out = head_of(a.o]=] [=[    add_weighted<kDim>(weights, tile, sums);
    block_barrier();
  }
  const Head<T> out = head_of(a.o]=])
add_mutant(weights_overwritten ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[  warp_barrier();  // the last weights are read
]=] "")
add_mutant(weights_read_early ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[weights[first + r][lane] = mine[r];
  warp_barrier();]=] [=[weights[first + r][lane] = mine[r];]=])

# Threads that leave before a barrier; blocks that race.
add_mutant(early_return engine/model/cuda_loss.cu loss *LossKernels*
  [=[  const float row_maximum]=] [=[  if (maximum == -INFINITY) return;
  const float row_maximum]=])
add_mutant(narrow_races ${ELEMENTWISE} elementwise ${ELEMENTWISE_TESTS}
  [=[size - begin < begin ? size : 2 * begin]=] [=[size]=])
add_mutant(chains_race engine/model/cuda_embedding.cu embedding *EmbeddingKernels*
  [=[(links[first] & kHasEarlier) != 0 || i >= d]=] [=[i >= d]=])

# Out of bounds, of shared and of global memory.
add_mutant(shared_beyond ${VECTOR} norm ${NORM_TESTS}
  [=[for (int i = 1; i < kThreads / kWarp; ++i) sum]=] [=[for (int i = 1; i <= kThreads / kWarp; ++i) sum]=])
add_mutant(global_beyond ${VECTOR} elementwise ${ELEMENTWISE_TESTS}
  [=[i + kWidth <= end]=] [=[i < end]=])
add_mutant(rows_beyond engine/model/cuda_reduction.cu reduction *ReductionKernels*
  [=[end = begin + part < row_end ? begin + part : row_end]=] [=[end = begin + part]=])
add_mutant(sequence_beyond ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[    if (t < s.sequence_len) store_row]=] [=[    store_row]=])

# Tails that are lost or counted twice.
add_mutant(tail_lost ${VECTOR} elementwise ${ELEMENTWISE_TESTS}
  [=[j < end; ++j]=] [=[j + 1 < end; ++j]=])
add_mutant(causal_off_by_one ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[key <= query0 + warp_row + r;
      const float score]=] [=[key < query0 + warp_row + r;
      const float score]=])

# Documents that see their neighbours, or lack their own tokens; tokens that are not trained on.
add_mutant(document_off_by_one ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[key >= begins[r] && key <= query0 + warp_row + r;
      p[r] = seen]=] [=[key + 1 >= begins[r] && key <= query0 + warp_row + r;
      p[r] = seen]=])
add_mutant(document_left_early ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[document_begin(s, query0) >= key0 + kRows) break]=] [=[document_begin(s, query0) > key0) break]=])
add_mutant(not_trained_but_scaled engine/model/cuda_loss.cu loss *LossKernels*
  [=[store<kWidth>(zeros, row + i);]=] "")

# Reductions of the wrong size, order or precision.
add_mutant(sum_lacks_a_warp ${VECTOR} norm ${NORM_TESTS}
  [=[for (int i = 1; i < kThreads / kWarp; ++i) sum]=] [=[for (int i = 2; i < kThreads / kWarp; ++i) sum]=])
add_mutant(warp_lacks_lanes ${VECTOR} loss *LossKernels*
  [=[mask /= 2) value += ]=] [=[mask /= 4) value += ]=])
add_mutant(group_lacks_a_head ${ATTENTION} attention ${ATTENTION_TESTS}
  [=[head < (kv_head + 1) * group; ++head]=] [=[head <= kv_head * group; ++head]=])
add_mutant(squares_in_float32 engine/model/cuda_reduction.cu reduction *ReductionKernels*
  [=[static_cast<double>(value[j]) * value[j]]=] [=[value[j] * value[j]]=])
add_mutant(update_reordered optim/cuda_update_rules.h update *UpdateKernels*
  [=[exact_mul(exact_mul(a.one_minus_beta2, g), g)]=] [=[exact_mul(a.one_minus_beta2, exact_mul(g, g))]=])
set(CODED optim/cuda_update_coded.cu)
add_mutant(scale_of_a_lane ${CODED} update_coded *UpdateKernels*
  [=[scale_of(warp_max(largest_first))]=] [=[scale_of(largest_first)]=])
add_mutant(row_in_32_lanes engine/model/cuda_reduction.cu reduction *FactoredKernels*
  [=[kRowsPerBlock = kThreads / kSumLanes]=] [=[kSumLanes = 32, kRowsPerBlock = kThreads / kSumLanes]=])
add_mutant(columns_in_64_parts engine/model/cuda_reduction.cu reduction *FactoredKernels*
  [=[kMaxRowParts = 32]=] [=[kMaxRowParts = 64]=])

# Frozen neighbours that count or are written; the randomness and averages of other parameters.
add_mutant(frozen_counts ${CODED} update_coded *UpdateKernels*
  [=[inside ? first_of(first[j], first_scale) : 0.0f]=] [=[first_of(first[j], first_scale)]=])
add_mutant(frozen_written ${CODED} update_coded *UpdateKernels*
  [=[      if (j < count) to[j] = ]=] [=[      to[j] = ]=])
add_mutant(same_noise ${CODED} update_coded *UpdateKernels*
  [=[bits_of_float(v[j]) + (random >> 16)]=] [=[bits_of_float(v[j]) + (random & 0xffffu)]=])
add_mutant(noise_of_the_chunk optim/cuda_update.cu update *UpdateKernels*
  [=[chunk.first / kStateBlock + block]=] [=[block]=])
add_mutant(row_not_left optim/cuda_update.cu update *UpdateKernels*
  [=[row_scale(++row)]=] [=[row_scale(row)]=])
add_mutant(torn_row_lost engine/model/cuda_reduction.cu reduction *FactoredKernels*
  [=[add_torn(whole_end, matrix.last);]=] "")

# Streams that do not wait for each other, results that are taken before they are there, and sums
# that forget what they held.
set(EXECUTOR engine/run/executor.cpp)
add_engine_mutant(stream_unordered ${EXECUTOR} *PlacementContract.TiersTied/bf16*
  [=[    runner_.device().wait(*lane.stream, *other.events[position % kAhead]);
]=] "")
add_engine_mutant(finished_early ${EXECUTOR} *PlacementContract.TiersTied/bf16*
  [=[    runner_.await(program_->ops[op], *lane.events[i % kAhead]);
]=] "")
add_engine_mutant(update_before_norm engine/run/op_runner.cpp NonFinite*
  [=[  return op.kind == OpKind::update && layout_.options.update == UpdateTiming::in_backward;
]=] [=[  return false;
]=])
add_engine_mutant(gradient_forgotten engine/model/cuda_llama.cpp *OneTwoAndFourRanksAgree/stage0*
  [=[first ? nullptr : dw);]=] [=[nullptr);]=])

# A program's streams that the pager does not wait for, and that do not wait for each other.
add_engine_mutant(overwritten_while_read engine/pager/pager_thread.cpp CApiGpu.WeightsStay*
  [=[      device.wait(static_cast<DeviceStream>(stream), *point);
]=] "")
add_engine_mutant(sums_unordered engine/pager/memory_uses.cpp CApiGpu.GivesTheHostsBits
  [=[  for (const Use& use : uses_) gpu->wait_on(stream, *use.end);
]=] "")
add_engine_mutant(spilled_before_copied engine/pager/activation_store.cpp CApiGpu.Activations*
  [=[    wait_for(saved.copy.take());
    channel_->write]=] [=[    channel_->write]=])
add_engine_mutant(held_but_updated engine/pager/pager_use.cpp CApiGpu.AHeldLayer*
  [=[  for (void* const stream : stored_[stored].streams) end_use(uses, stream);
]=] "")
