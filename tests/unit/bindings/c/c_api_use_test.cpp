// Steps that are skipped, scaled, incomplete or out of order; activations, memory, statistics and
// callbacks.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

class CApiUse : public SmallEngineTest {
 protected:
  static osp_step_options_t rates() {
    osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
    options.learning_rate = 1e-2;
    return options;
  }
  static osp_step_result_t result_of(osp_engine_t engine) {
    osp_step_result_t result = OSP_STEP_RESULT_INIT;
    EXPECT_TRUE(status_is(osp_step_wait(engine, &result), OSP_SUCCESS));
    return result;
  }
  static void submit_scaled(osp_engine_t engine, uint32_t layer, uint64_t key, float scale) {
    const auto& tensors = small_layers()[layer];
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].frozen) continue;
      std::vector<float> values = gradient(key * 100 + layer * 10 + t, tensors[t].count());
      for (float& value : values) value *= scale;
      OSP_OK(osp_submit_gradient(engine, layer, t, values.data(), OSP_FLOAT32, values.size(),
                                 nullptr));
    }
  }
};

TEST_F(CApiUse, LossScalesAreDividedOut) {
  osp_engine_t plain = make(configuration()), scaled = make(configuration());
  for (uint64_t key = 1; key < 4; ++key) {
    step(plain, key);
    for (uint32_t layer = 0; layer < 3; ++layer) submit_scaled(scaled, layer, key, 1024.0f);
    osp_step_options_t options = rates();
    options.loss_scale = 1024.0;
    OSP_OK(osp_step(scaled, &options));
    EXPECT_EQ(result_of(plain).gradient_norm, result_of(scaled).gradient_norm);
    EXPECT_EQ(result_of(plain).clip_factor, result_of(scaled).clip_factor);
    EXPECT_LT(result_of(plain).clip_factor, 1.0);
  }
  EXPECT_EQ(read_all(plain), read_all(scaled));
  OSP_OK(osp_engine_destroy(plain));
  OSP_OK(osp_engine_destroy(scaled));
}

TEST_F(CApiUse, StepsThatAreNotFiniteAreSkipped) {
  for (const bool in_backward : {false, true}) {
    const std::string text = in_backward
                                 ? configuration("max_grad_norm: 0\n", "  update: in_backward\n")
                                 : configuration();
    osp_engine_t skipping = make(text), plain = make(text);
    const osp_step_options_t options = rates();
    for (const bool finite : {false, true, false, true, true}) {
      if (finite) {
        step(skipping, 5, in_backward);
        step(plain, 5, in_backward);
        continue;
      }
      if (in_backward) {
        OSP_EXPECT(OSP_SUCCESS, osp_step_begin(skipping, &options));
      }
      const float infinite = std::numeric_limits<float>::infinity();
      for (uint32_t layer = 3; layer-- > 0;) submit_scaled(skipping, layer, 9, infinite);
      OSP_OK(osp_step(skipping, in_backward ? nullptr : &options));
      EXPECT_EQ(result_of(skipping).skipped, 1);
    }
    EXPECT_EQ(result_of(skipping).step, 5u);
    EXPECT_EQ(result_of(skipping).updates, 3u);
    EXPECT_EQ(read_all(skipping), read_all(plain));
    OSP_OK(osp_engine_destroy(skipping));
    OSP_OK(osp_engine_destroy(plain));
  }
}

TEST_F(CApiUse, TooManySkippedStepsEndTheRun) {
  osp_engine_t engine = make(configuration("max_non_finite_steps: 2\n"));
  const osp_step_options_t options = rates();
  for (int i = 0; i < 2; ++i) {
    for (uint32_t layer = 0; layer < 3; ++layer) submit_scaled(engine, layer, 9, NAN);
    OSP_OK(osp_step(engine, &options));
    OSP_EXPECT(i == 0 ? OSP_SUCCESS : OSP_ERROR_NON_FINITE, osp_step_wait(engine, nullptr));
  }
  OSP_EXPECT(OSP_ERROR_NON_FINITE, osp_acquire(engine, 0, nullptr, nullptr, 0));
  OSP_EXPECT(OSP_ERROR_NON_FINITE, osp_engine_destroy(engine));
}

TEST_F(CApiUse, LayersWithoutAGradientStayAsTheyAre) {
  osp_engine_t engine = make(configuration());
  const std::vector<float> before = read(engine, "block.weight", 64 * 192);
  const std::vector<float> norm = read(engine, "head.norm", 64);
  for (uint64_t key = 1; key < 3; ++key) {
    submit(engine, 2, key);
    osp_step_options_t options = rates();
    OSP_EXPECT(OSP_ERROR_GRADIENT_MISSING, osp_step(engine, &options));
    options.allow_missing = 1;
    OSP_OK(osp_step(engine, &options));
    EXPECT_EQ(result_of(engine).updates, key);
  }
  EXPECT_EQ(read(engine, "block.weight", 64 * 192), before);
  EXPECT_NE(read(engine, "head.norm", 64), norm);
  // Its first update comes later than others'.
  step(engine, 3);
  EXPECT_NE(read(engine, "block.weight", 64 * 192), before);
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, GradientsComeInEveryType) {
  osp_engine_t wide = make(configuration()), half = make(configuration());
  std::vector<uint16_t> bits(64 * 192, 0x3c00);  // 1 in float16
  std::vector<float> ones(64 * 192, 1.0f);
  OSP_OK(osp_submit_gradient(half, 1, 0, bits.data(), OSP_FLOAT16, bits.size(), nullptr));
  bits.assign(64, 0x3f80);  // 1 in bfloat16
  OSP_OK(osp_submit_gradient(half, 1, 1, bits.data(), OSP_BFLOAT16, 64, nullptr));
  OSP_OK(osp_submit_gradient(wide, 1, 0, ones.data(), OSP_FLOAT32, ones.size(), nullptr));
  OSP_OK(osp_submit_gradient(wide, 1, 1, ones.data(), OSP_FLOAT32, 64, nullptr));
  osp_step_options_t options = rates();
  options.allow_missing = 1;
  for (const osp_engine_t engine : {wide, half}) OSP_OK(osp_step(engine, &options));
  EXPECT_EQ(read_all(wide), read_all(half));
  for (const osp_engine_t engine : {wide, half}) OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, DeviationsStayRightAndAreToldOnce) {
  std::vector<std::string> lines;
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.user = &lines;
  options.log_level = OSP_LOG_WARNING;
  options.log = [](void* user, osp_log_level_t, const char* message) {
    static_cast<std::vector<std::string>*>(user)->push_back(message);
  };
  osp_engine_t orderly = make(configuration()), wayward = make(configuration(), options);
  step(orderly, 1);
  step(wayward, 1);
  for (uint64_t key = 2; key < 5; ++key) {
    step(orderly, key);
    use(wayward, 2);  // another order each time, one layer again, one not at all
    use(wayward, key % 2 == 0 ? 0 : 1);
    use(wayward, 2);
    for (const uint32_t layer : {1u, 0u, 2u}) submit(wayward, layer, key);
    const osp_step_options_t rate = rates();
    OSP_OK(osp_step(wayward, &rate));
  }
  EXPECT_EQ(read_all(orderly), read_all(wayward));
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  OSP_OK(osp_get_statistics(wayward, &statistics));
  EXPECT_GE(statistics.deviations, 4u);
  EXPECT_EQ(std::ranges::count_if(lines,
                                  [](const std::string& line) {
                                    return line.find("comes in the order") != std::string::npos;
                                  }),
            3);
  OSP_OK(osp_get_statistics(orderly, &statistics));
  EXPECT_EQ(statistics.deviations, 0u);
  EXPECT_EQ(statistics.deviation_bytes, 0u);
  OSP_OK(osp_engine_destroy(orderly));
  OSP_OK(osp_engine_destroy(wayward));
}

TEST_F(CApiUse, ADeclaredOrderIsFetchedAheadFromTheFirstStep) {
  osp_engine_t engine = make(configuration());
  const uint32_t order[] = {2, 0, 1};
  OSP_OK(osp_set_order(engine, order, 3));
  for (const uint32_t layer : order) use(engine, layer);
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  OSP_OK(osp_get_statistics(engine, &statistics));
  EXPECT_EQ(statistics.deviations, 0u);
  EXPECT_EQ(statistics.acquires, 3u);
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, LayersThatAStepDoesNotAcquireAreUpdatedByTheirWholeGradient) {
  const std::string text = configuration("gradient_accumulation_steps: 2\nmax_grad_norm: 0\n");
  osp_engine_t acquires = make(text), submits = make(text);
  osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
  options.learning_rate = 1e-2;
  for (uint64_t key = 1; key < 5; ++key) {
    for (const osp_engine_t engine : {acquires, submits}) {
      for (uint64_t mb = 0; mb < 2; ++mb) {
        for (uint32_t layer = 0; layer < 3; ++layer) {
          if (engine == acquires) use(engine, layer);
          submit(engine, layer, 2 * key + mb);
        }
      }
      OSP_OK(osp_step(engine, &options));
    }
  }
  EXPECT_TRUE(read_all(acquires) == read_all(submits));
  OSP_OK(osp_engine_destroy(acquires));
  OSP_OK(osp_engine_destroy(submits));
}

TEST_F(CApiUse, WhatIsMissingIsCompletedThoughSlotsAreTaken) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.loop = OSP_LOOP_LAYER_MAJOR;
  osp_engine_t engine = make(configuration(), options);
  const auto give = [&](uint32_t layer, uint32_t tensor) {
    const std::vector<float> values = gradient(layer, small_layers()[layer][tensor].count());
    return osp_submit_gradient(engine, layer, tensor, values.data(), OSP_FLOAT32, values.size(),
                               nullptr);
  };
  OSP_OK(give(2, 1));  // the first layer's, a part
  OSP_OK(give(2, 0));
  OSP_OK(give(1, 0));  // a part
  osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
  rates.learning_rate = 1e-2;
  rates.allow_missing = 1;
  OSP_OK(osp_step(engine, &rates));
  osp_step_result_t result = OSP_STEP_RESULT_INIT;
  OSP_OK(osp_step_wait(engine, &result));
  EXPECT_GT(result.gradient_norm, 0);
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, ActivationsComeBackAsTheyWere) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.activation_host_bytes = 64 << 10;
  options.activation_nvme_bytes = 1 << 20;
  osp_engine_t engine = make(configuration(), options);
  std::vector<std::vector<float>> buffers;
  std::vector<osp_activation_t> saved;
  for (uint64_t i = 0; i < 20; ++i) {
    buffers.push_back(gradient(i, 3000 + 777 * i % 5000));
    OSP_OK(osp_activation_save(engine, buffers[i].data(), buffers[i].size() * 4, nullptr,
                               &saved.emplace_back()));
  }
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  OSP_OK(osp_get_statistics(engine, &statistics));
  EXPECT_GT(statistics.activation_bytes_spilled, 0u);
  OSP_OK(osp_activation_discard(engine, saved[19]));
  for (size_t i = 19; i-- > 0;) {
    if (i > 0) {
      OSP_EXPECT(OSP_SUCCESS, osp_activation_prefetch(engine, saved[i - 1]));
    }
    std::vector<float> back(buffers[i].size());
    OSP_EXPECT(OSP_ERROR_SIZE_MISMATCH,
               osp_activation_restore(engine, saved[i], back.data(), 4, nullptr));
    OSP_OK(osp_activation_restore(engine, saved[i], back.data(), back.size() * 4, nullptr));
    EXPECT_EQ(back, buffers[i]) << i;
    OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_activation_discard(engine, saved[i]));
  }
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, ActivationsComeBackWhenAllIsFull) {
  constexpr uint64_t kPlaces = 3, kCount = 1 << 20, kBytes = kCount * sizeof(float);
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.activation_host_bytes = options.activation_nvme_bytes = kPlaces * kBytes;
  osp_engine_t engine = make(configuration(), options);
  std::vector<std::vector<float>> buffers;
  std::vector<osp_activation_t> saved;
  const auto save = [&](uint64_t i) {
    buffers.push_back(gradient(i, kCount));
    return osp_activation_save(engine, buffers[i].data(), kBytes, nullptr, &saved.emplace_back());
  };
  for (uint64_t i = 0; i < 2 * kPlaces; ++i) OSP_OK(save(i));
  OSP_EXPECT(OSP_ERROR_DOES_NOT_FIT, save(2 * kPlaces));
  OSP_OK(osp_activation_prefetch(engine, saved[0]));  // has no place to go
  for (uint64_t i = 0; i < 2 * kPlaces; ++i) {
    std::vector<float> back(kCount);
    OSP_OK(osp_activation_restore(engine, saved[i], back.data(), kBytes, nullptr));
    EXPECT_TRUE(back == buffers[i]) << i;
  }
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, MemoryIsZeroedWritableAndReturned) {
  osp_engine_t engine = make(configuration());
  void* memory = nullptr;
  OSP_OK(osp_memory_allocate(engine, 10000, -1, &memory));
  auto* bytes = static_cast<unsigned char*>(memory);
  EXPECT_EQ(std::count(bytes, bytes + 10000, 0), 10000);
  std::fill(bytes, bytes + 10000, 7);
  OSP_OK(osp_memory_free(engine, memory));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_memory_free(engine, memory));
  OSP_OK(osp_memory_allocate(engine, 10000, -1, &memory));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, PlansStatisticsAndTracesSayWhatHappens) {
  osp_engine_t engine = make(configuration());
  size_t needed = 0;
  OSP_OK(osp_describe_plan(engine, nullptr, 0, &needed));
  std::string text(needed, 'x');
  OSP_OK(osp_describe_plan(engine, text.data(), needed, nullptr));
  EXPECT_EQ(text.back(), '\0');
  EXPECT_NE(text.find("optimizer state: nvme"), std::string::npos) << text;
  OSP_OK(osp_describe_plan(engine, text.data(), 5, nullptr));
  EXPECT_EQ(text[4], '\0');
  osp_tensor_info_t tied = OSP_TENSOR_INFO_INIT;
  OSP_OK(osp_tensor_get_info(engine, "head.weight", &tied));
  EXPECT_EQ(tied.layer, 2u);
  EXPECT_EQ(tied.owner_layer, 0u);
  osp_layer_info_t info = OSP_LAYER_INFO_INIT;
  OSP_OK(osp_layer_get_info(engine, 1, &info));
  EXPECT_EQ(info.tensors, 2u);
  EXPECT_EQ(info.weights, OSP_TIER_NVME);
  EXPECT_EQ(info.flat_count % 4096, 0u);

  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_trace_write(engine, (root_ / "t.json").c_str()));
  OSP_OK(osp_trace_start(engine));
  step(engine, 1);
  step(engine, 2);
  OSP_OK(osp_trace_write(engine, (root_ / "t.json").c_str()));
  std::ifstream stream(root_ / "t.json");
  const nlohmann::json trace = nlohmann::json::parse(stream);
  EXPECT_GT(trace.at("traceEvents").size(), 20u);
  OSP_OK(osp_flush(engine));
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  OSP_OK(osp_get_statistics(engine, &statistics));
  EXPECT_EQ(statistics.steps, 2u);
  EXPECT_EQ(statistics.updates, 2u);
  EXPECT_EQ(statistics.acquires, 12u);
  EXPECT_GT(statistics.lane_bytes[OSP_LANE_NVME_WRITE], 0u);
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiUse, OlderProgramsGiveShorterStructures) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.size = offsetof(osp_engine_options_t, held_layers);
  options.held_layers = 0;  // beyond what that program knows
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create("precision: float32", &options, &engine));
  register_all(engine);
  osp_plan_t plan = OSP_PLAN_INIT;
  plan.size = offsetof(osp_plan_t, trainable_parameters);
  plan.trainable_parameters = 77;
  OSP_OK(osp_finalize(engine, &plan));
  EXPECT_EQ(plan.layers, 3u);
  EXPECT_EQ(plan.trainable_parameters, 77u);
  OSP_OK(osp_engine_destroy(engine));
}

}  // namespace
}  // namespace overspill
