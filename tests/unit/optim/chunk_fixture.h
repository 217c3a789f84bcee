// A chunk with memory of its own for optimizer tests: random masters, any settings, and both
// updates: the engine's and the reference's.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/base/random.h"
#include "optim/optimizer.h"
#include "optim/split_master.h"
#include "optim/update_kernels.h"
#include "tests/unit/optim/reference_update.h"

namespace overspill {

/// Normal values over `decades` powers of ten either way, exact in bf16.
inline std::vector<float> bf16_values(uint64_t key, size_t size, int decades) {
  std::vector<float> values;
  for (size_t i = 0; i < size; ++i) {
    const auto exponent = static_cast<int>(random_below(key + 1, i, 2 * decades + 1)) - decades;
    const float value = random_normal(key, i) * std::pow(10.0f, static_cast<float>(exponent));
    values.push_back(bf16_to_float(float_to_bf16(value)));
  }
  return values;
}

inline uint64_t whole_blocks(uint64_t parameters) {
  return (parameters + kStateBlock - 1) / kStateBlock * kStateBlock;
}

/// State bytes start as 0xff: NaN, or codes out of order, wherever something is read too early.
class TestChunk {
 public:
  OptimizerSettings settings;
  uint64_t parameters, exact;
  uint64_t layer = 3, first = 0;
  std::vector<std::byte> weight, state, gradient;
  std::vector<float> averages;  ///< of factored moments

  TestChunk(const OptimizerSettings& with, const std::vector<float>& start,
            uint64_t exact_count = 0)
      : settings(with), parameters(whole_blocks(start.size())), exact(exact_count) {
    const bool split = settings.master == MasterFormat::split;
    weight.resize(parameters * (split ? 2 : 4));
    gradient.resize(weight.size());
    state.resize(state_layout(settings, parameters, exact).bytes, std::byte{0xff});
    const UpdateChunk chunk = view();
    const ReferenceChunk values(settings, chunk);
    for (uint64_t i = 0; i < parameters; ++i) {
      values.set_master(i, i < start.size() ? start[i] : 0.0f);
    }
  }

  UpdateChunk view() {
    return {weight.data(), state.data(), gradient.data(), parameters,
            exact,         layer,        first,           averages.data()};
  }
  /// The gradients must be exact in bf16 where the master is split.
  void set_gradient(const std::vector<float>& values) {
    for (uint64_t i = 0; i < values.size(); ++i) {
      if (settings.master == MasterFormat::float32) {
        set_element(gradient.data(), i, values[i]);
      } else {
        set_element(gradient.data(), i, float_to_bf16(values[i]));
      }
    }
  }
  void update(const UpdateStep& step, std::span<const UpdateRun> runs, bool zero) {
    update_chunk(settings, step, view(), runs, zero);
  }
  void reference(const UpdateStep& step, std::span<const UpdateRun> runs, bool zero) {
    reference_update(settings, step, view(), runs, zero);
  }

  /// Of the first `count` parameters; moments that the optimizer lacks are zero.
  std::vector<float> masters(uint64_t count) {
    return collect(count, [](const ReferenceChunk& c, uint64_t i) { return c.master(i); });
  }
  std::vector<float> firsts(uint64_t count) {
    return collect(count, [](const ReferenceChunk& c, uint64_t i) {
      return c.has_first() ? c.first(i) : 0.0f;
    });
  }
  std::vector<float> seconds(uint64_t count) {
    return collect(count, [](const ReferenceChunk& c, uint64_t i) {
      return c.has_second() ? c.second(i) : 0.0f;
    });
  }

 private:
  template <class Value>
  std::vector<float> collect(uint64_t count, const Value& value) {
    const UpdateChunk chunk = view();
    const ReferenceChunk values(settings, chunk);
    std::vector<float> result;
    for (uint64_t i = 0; i < count; ++i) result.push_back(value(values, i));
    return result;
  }
};

/// Copies of a chunk, one for each instruction set that this processor has.
class TargetChunks {
 public:
  explicit TargetChunks(const TestChunk& start) : chunks_(targets_.size(), start) {}

  /// Updates `want` by the reference and every copy by its target: the same bits.
  void update(TestChunk& want, const UpdateStep& step, const std::vector<float>& gradient,
              std::span<const UpdateRun> runs, bool zero) {
    want.set_gradient(gradient);
    want.reference(step, runs, zero);
    for (size_t target = 0; target < chunks_.size(); ++target) {
      SCOPED_TRACE(update_target_name(targets_[target]));
      force_update_target(targets_[target]);
      chunks_[target].set_gradient(gradient);
      chunks_[target].update(step, runs, zero);
      force_update_target(0);
      EXPECT_TRUE(chunks_[target].weight == want.weight);
      EXPECT_TRUE(chunks_[target].state == want.state);
    }
  }

 private:
  const std::vector<int64_t> targets_ = update_targets();
  std::vector<TestChunk> chunks_;
};

inline constexpr OptimizerKind kKinds[] = {OptimizerKind::adamw, OptimizerKind::lion,
                                           OptimizerKind::sgd};
inline constexpr StateFormat kStates[] = {StateFormat::float32, StateFormat::bfloat16,
                                          StateFormat::int8};
inline constexpr MasterFormat kMasters[] = {MasterFormat::split, MasterFormat::float32};

/// Every kind, state format and master; sgd also without momentum.
inline std::vector<OptimizerSettings> all_settings() {
  std::vector<OptimizerSettings> all;
  for (const OptimizerKind kind : kKinds) {
    for (const StateFormat state : kStates) {
      for (const MasterFormat master : kMasters) {
        OptimizerSettings settings{.kind = kind, .state = state, .master = master, .beta2 = 0.99};
        settings.weight_decay = 0.1;
        settings.seed = 11;
        all.push_back(settings);
        if (kind != OptimizerKind::sgd) continue;
        settings.momentum = 0;
        all.push_back(settings);
      }
    }
  }
  return all;
}

inline std::string describe(const OptimizerSettings& s) {
  const char* kinds[] = {"adamw", "lion", "sgd", "adafactor"};
  const char* states[] = {"float32", "bfloat16", "int8"};
  return std::string(kinds[static_cast<int>(s.kind)]) + " " + states[static_cast<int>(s.state)] +
         (s.master == MasterFormat::split ? " split" : " float32 master") +
         (s.kind == OptimizerKind::sgd && s.momentum == 0 ? " without momentum" : "");
}

}  // namespace overspill
