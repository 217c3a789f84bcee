// AdamW against torch.optim.AdamW's numbers (tests/golden/adamw_pytorch.py), the split master
// against the float32 one bit for bit, decay ranges and moments that are still zero.
#include "optim/adamw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/base/random.h"
#include "optim/split_master.h"

namespace overspill {
namespace {

using Json = nlohmann::json;
using Floats = std::vector<float>;

struct Float32State {
  Floats weight, exp_avg, exp_avg_sq;
  explicit Float32State(Floats start)
      : weight(std::move(start)), exp_avg(weight.size(), NAN), exp_avg_sq(weight.size(), NAN) {}
  void update(const AdamWStep& step, const Floats& gradient, std::span<const DecayRange> decay,
              bool zero) {
    adamw_update(step,
                 Float32Chunk{weight.data(), exp_avg.data(), exp_avg_sq.data(), gradient.data()},
                 weight.size(), decay, zero);
  }
};

struct SplitState {
  std::vector<uint16_t> weight;
  std::vector<int16_t> remainder;
  Floats exp_avg, exp_avg_sq;
  explicit SplitState(const Floats& start)
      : exp_avg(start.size(), NAN), exp_avg_sq(start.size(), NAN) {
    for (const float value : start) {
      weight.push_back(split_master(value).weight);
      remainder.push_back(split_master(value).remainder);
    }
  }
  /// The gradients must be exact in bf16.
  void update(const AdamWStep& step, const Floats& gradient, std::span<const DecayRange> decay,
              bool zero) {
    std::vector<uint16_t> narrow;
    for (const float value : gradient) {
      narrow.push_back(float_to_bf16(value));
      EXPECT_EQ(bf16_to_float(narrow.back()), value);
    }
    adamw_update(step,
                 SplitChunk{weight.data(), remainder.data(), exp_avg.data(), exp_avg_sq.data(),
                            narrow.data()},
                 weight.size(), decay, zero);
  }
  Floats master() const {
    Floats joined;
    for (size_t i = 0; i < weight.size(); ++i) {
      joined.push_back(join_master(weight[i], remainder[i]));
    }
    return joined;
  }
};

std::vector<uint32_t> bits(const Floats& values) {
  std::vector<uint32_t> result;
  for (const float value : values) result.push_back(std::bit_cast<uint32_t>(value));
  return result;
}

/// Normal values over `decades` powers of ten, exact in bf16.
Floats bf16_values(uint64_t key, size_t size, int decades) {
  Floats values;
  for (size_t i = 0; i < size; ++i) {
    const auto exponent = static_cast<int>(random_below(key + 1, i, 2 * decades + 1)) - decades;
    const float value = random_normal(key, i) * std::pow(10.0f, static_cast<float>(exponent));
    values.push_back(bf16_to_float(float_to_bf16(value)));
  }
  return values;
}

AdamWSettings settings_of(const Json& c) {
  return {c.at("beta1"), c.at("beta2"), c.at("epsilon"), c.at("weight_decay")};
}

/// Both compute each element in float32 from float64 scalars, but in another order of roundings:
/// each step may add a unit in the last place of the largest term that the sum has seen.
constexpr double kUnit = 0x1p-23;
void expect_near(const Floats& got, const Floats& want, const Floats& terms, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const double scale = std::max(std::abs(want[i]), std::abs(terms[i]));
    EXPECT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
  }
}

Json golden() {
  std::ifstream stream(OVERSPILL_SOURCE_DIR "/tests/golden/adamw_pytorch.json");
  return Json::parse(stream);
}

template <class State>
void follow_pytorch(const Json& c, std::span<const DecayRange> decay,
                    Floats (*master)(const State&)) {
  State state{c.at("start").get<Floats>()};
  Floats weights = c.at("start"), gradients(weights.size());  // the largest each has been
  const auto raise = [](Floats& largest, const Floats& values, float least) {
    for (size_t i = 0; i < values.size(); ++i) {
      largest[i] = std::max({std::abs(largest[i]), std::abs(values[i]), least});
    }
  };
  double t = 0;
  for (const Json& golden_step : c.at("steps")) {
    SCOPED_TRACE(t);
    ++t;
    const float rate = golden_step.at("learning_rate");
    const Floats gradient = golden_step.at("gradient"), weight = golden_step.at("weight");
    const AdamWStep step =
        adamw_step(settings_of(c), golden_step.at("learning_rate"), static_cast<uint64_t>(t), 1.0);
    state.update(step, gradient, decay, t == 1);
    raise(weights, weight, rate);
    raise(gradients, gradient, 0);
    expect_near(master(state), weight, weights, kUnit * (1 + t));
    expect_near(state.exp_avg, golden_step.at("exp_avg"), gradients, kUnit * (1 + t));
    expect_near(state.exp_avg_sq, golden_step.at("exp_avg_sq"), Floats(weight.size()),
                kUnit * (2 + t));
  }
}

TEST(AdamW, Float32IsPyTorchs) {
  const Json all = golden();
  const DecayRange decay[] = {{0, all.at("decayed")}};
  for (const Json& c : all.at("cases")) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    follow_pytorch<Float32State>(c, decay, [](const Float32State& s) { return s.weight; });
  }
}

TEST(AdamW, SplitMasterIsPyTorchs) {
  const Json all = golden();
  const DecayRange decay[] = {{0, all.at("decayed")}};
  for (const Json& c : all.at("cases")) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    follow_pytorch<SplitState>(c, decay, [](const SplitState& s) { return s.master(); });
  }
}

TEST(AdamW, SplitMasterFollowsFloat32BitForBit) {
  constexpr size_t kSize = 70001;  // several blocks of the loop, and an odd end
  Floats start;
  for (size_t i = 0; i < kSize; ++i) {
    start.push_back(random_normal(1, i) * std::pow(10.0f, static_cast<float>(i % 9) - 6));
  }
  Float32State wide(start);
  SplitState split(start);
  const DecayRange decay[] = {{3, 33000}, {40000, 70000}};
  const AdamWSettings settings{0.9, 0.95, 1e-8, 0.1};
  for (uint64_t t = 1; t <= 6; ++t) {
    const AdamWStep step = adamw_step(settings, 1e-3 / static_cast<double>(t), t, 0.37);
    const Floats gradient = bf16_values(100 * t, kSize, 4);
    wide.update(step, gradient, decay, t == 1);
    split.update(step, gradient, decay, t == 1);
    ASSERT_TRUE(bits(split.master()) == bits(wide.weight)) << "step " << t;
    ASSERT_TRUE(bits(split.exp_avg) == bits(wide.exp_avg)) << "step " << t;
    ASSERT_TRUE(bits(split.exp_avg_sq) == bits(wide.exp_avg_sq)) << "step " << t;
  }
  EXPECT_NE(bits(wide.weight), bits(start));
}

TEST(AdamW, DecayAppliesInsideItsRangesOnly) {
  // Without gradient and moments an update is the decay alone.
  const AdamWStep step = adamw_step({.weight_decay = 0.5}, 0.1, 1, 1.0);
  const std::vector<std::vector<DecayRange>> layouts = {
      {}, {{0, 100}}, {{0, 1}}, {{99, 100}}, {{10, 20}, {20, 30}, {50, 64}}};
  for (const auto& ranges : layouts) {
    Float32State wide(Floats(100, 2.0f));
    SplitState split(Floats(100, 2.0f));
    wide.update(step, Floats(100, 0.0f), ranges, true);
    split.update(step, Floats(100, 0.0f), ranges, true);
    for (uint64_t i = 0; i < 100; ++i) {
      bool inside = false;
      for (const DecayRange& range : ranges) inside |= range.begin <= i && i < range.end;
      EXPECT_EQ(wide.weight[i], inside ? 2.0f * 0.95f : 2.0f) << i;
      EXPECT_EQ(split.master()[i], wide.weight[i]) << i;
    }
  }
}

TEST(AdamW, ZeroMomentsNeedNotBeRead) {
  constexpr size_t kSize = 40000;
  const Floats start = bf16_values(5, kSize, 2), gradient = bf16_values(7, kSize, 3);
  const AdamWStep step = adamw_step({.weight_decay = 0.1}, 1e-3, 1, 0.5);
  const DecayRange decay[] = {{100, 35000}};
  Float32State unread(start), zero(start);  // unread's moments are NaN
  std::fill(zero.exp_avg.begin(), zero.exp_avg.end(), 0.0f);
  std::fill(zero.exp_avg_sq.begin(), zero.exp_avg_sq.end(), 0.0f);
  unread.update(step, gradient, decay, true);
  zero.update(step, gradient, decay, false);
  EXPECT_TRUE(bits(unread.weight) == bits(zero.weight));
  EXPECT_TRUE(bits(unread.exp_avg) == bits(zero.exp_avg));
  EXPECT_TRUE(bits(unread.exp_avg_sq) == bits(zero.exp_avg_sq));
  EXPECT_TRUE(std::isfinite(unread.weight[0]));
}

TEST(AdamW, ClipFactorScalesTheGradient) {
  const Floats start = bf16_values(11, 100, 1), gradient = bf16_values(13, 100, 2);
  Floats halved = gradient;
  for (float& value : halved) value *= 0.5f;
  Float32State clipped(start), small(start);
  clipped.update(adamw_step({}, 1e-3, 1, 0.5), gradient, {}, true);
  small.update(adamw_step({}, 1e-3, 1, 1.0), halved, {}, true);
  EXPECT_EQ(bits(clipped.exp_avg), bits(small.exp_avg));
  EXPECT_EQ(bits(clipped.weight), bits(small.weight));
}

TEST(AdamW, FirstStepMovesEveryWeightByTheLearningRate) {
  // Bias correction makes m / sqrt(v) the gradient's sign at t = 1.
  Float32State state(Floats{1.0f, 1.0f, 1.0f});
  state.update(adamw_step({}, 0.25, 1, 1.0), {1e-3f, -5.0f, 7e4f}, {}, true);
  EXPECT_NEAR(state.weight[0], 0.75, 3e-6);  // epsilon is 1e-5 of this gradient
  EXPECT_NEAR(state.weight[1], 1.25, 1e-6);
  EXPECT_NEAR(state.weight[2], 0.75, 1e-6);
}

}  // namespace
}  // namespace overspill
