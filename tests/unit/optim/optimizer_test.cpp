// The optimizers against torch.optim's numbers (tests/golden/adamw_pytorch.py) and against formulas
// in float64; the split master against the float32 one; runs, zero moments, clipping, the cut into
// chunks; and that 8-bit and bf16 state train as float32 state does.
#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/unit/optim/chunk_fixture.h"

namespace overspill {
namespace {

using Json = nlohmann::json;
using Floats = std::vector<float>;

/// As bits, so that NaN and minus zero compare too.
std::vector<uint32_t> bits(const Floats& values) {
  std::vector<uint32_t> result;
  for (const float value : values) result.push_back(std::bit_cast<uint32_t>(value));
  return result;
}

UpdateStep one_rate(const OptimizerSettings& settings, double rate, uint64_t t, double scale = 1) {
  return update_step(settings, std::span(&rate, 1), t, scale);
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

/// The first `decayed` values, and the others from the second block on.
Floats apart(const Floats& values, size_t decayed) {
  Floats result(kStateBlock);
  std::copy_n(values.begin(), decayed, result.begin());
  result.insert(result.end(), values.begin() + static_cast<ptrdiff_t>(decayed), values.end());
  return result;
}

void follow_pytorch(const Json& c, size_t decayed, MasterFormat master) {
  const auto floats = [&](const Json& values) { return apart(values.get<Floats>(), decayed); };
  const OptimizerSettings settings{.master = master,
                                   .beta1 = c.at("beta1"),
                                   .beta2 = c.at("beta2"),
                                   .epsilon = c.at("epsilon"),
                                   .weight_decay = c.at("weight_decay")};
  TestChunk chunk(settings, floats(c.at("start")));
  const size_t size = floats(c.at("start")).size();
  const UpdateRun runs[] = {{0, decayed}, {kStateBlock, size, false}};
  Floats weights = floats(c.at("start")), gradients(size);  // the largest each has been
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
    const Floats gradient = floats(golden_step.at("gradient"));
    const Floats weight = floats(golden_step.at("weight"));
    chunk.set_gradient(gradient);
    chunk.update(one_rate(settings, golden_step.at("learning_rate"), static_cast<uint64_t>(t)),
                 runs, t == 1);
    raise(weights, weight, rate);
    raise(gradients, gradient, 0);
    expect_near(chunk.masters(size), weight, weights, kUnit * (1 + t));
    expect_near(chunk.firsts(size), floats(golden_step.at("exp_avg")), gradients, kUnit * (1 + t));
    expect_near(chunk.seconds(size), floats(golden_step.at("exp_avg_sq")), Floats(size),
                kUnit * (2 + t));
  }
}

TEST(Optimizer, AdamWIsPyTorchs) {
  const Json all = golden();
  for (const Json& c : all.at("cases")) {
    for (const MasterFormat master : kMasters) {
      SCOPED_TRACE(c.at("name").get<std::string>());
      follow_pytorch(c, all.at("decayed"), master);
    }
  }
}

/// The gradients of the long runs in adamw_pytorch.py.
Floats long_gradient(uint64_t step, size_t size) {
  Floats values;
  for (uint64_t i = 0; i < size; ++i) {
    const uint64_t mixed = ((i + 1) * (step * step + 7 * step + 3) * 40503) >> 8;
    values.push_back(static_cast<float>(static_cast<int>(mixed % 255) - 127) / 128);
  }
  return values;
}

OptimizerSettings long_settings(const Json& c) {
  OptimizerSettings settings{.weight_decay = c.at("weight_decay")};
  settings.kind = c.at("name") == "adamw" ? OptimizerKind::adamw : OptimizerKind::sgd;
  settings.momentum = c.value("momentum", 0.0);
  return settings;
}

TEST(Optimizer, HundredStepsAreWithinAMillionthOfPyTorchs) {
  const Json all = golden();
  for (const Json& c : all.at("long")) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    for (const MasterFormat master : kMasters) {
      OptimizerSettings settings = long_settings(c);
      settings.master = master;
      const Floats start = c.at("start");
      TestChunk chunk(settings, start);
      const UpdateRun runs[] = {{0, start.size()}};
      for (uint64_t t = 1; t <= c.at("steps"); ++t) {
        chunk.set_gradient(long_gradient(t, start.size()));
        chunk.update(one_rate(settings, c.at("learning_rate"), t), runs, t == 1);
      }
      const Floats ones(start.size(), 1.0f), none(start.size());
      expect_near(chunk.masters(start.size()), c.at("weight"), none, 1e-6);
      if (c.contains("exp_avg_sq")) {
        expect_near(chunk.firsts(start.size()), c.at("exp_avg"), ones, 1e-6);
        expect_near(chunk.seconds(start.size()), c.at("exp_avg_sq"), none, 1e-6);
      } else if (c.contains("momentum_buffer")) {
        expect_near(chunk.firsts(start.size()), c.at("momentum_buffer"), ones, 1e-6);
      }
    }
  }
}

TEST(Optimizer, LionIsThePapersFormula) {
  const OptimizerSettings settings{
      .kind = OptimizerKind::lion, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
  constexpr size_t kSize = 8;
  constexpr double kRate = 1e-3;
  Floats start;
  for (size_t i = 0; i < kSize; ++i) start.push_back(0.25f * static_cast<float>(i + 1));
  std::vector<double> p(start.begin(), start.end()), m(kSize);
  const double rounded_decay = static_cast<float>(1 - kRate * 0.1);  // alone 3e-8 off, each step
  TestChunk chunk(settings, start);
  const UpdateRun runs[] = {{0, kSize}};
  for (uint64_t t = 1; t <= 100; ++t) {
    const Floats gradient = long_gradient(t, kSize);
    chunk.set_gradient(gradient);
    chunk.update(one_rate(settings, kRate, t), runs, t == 1);
    for (size_t i = 0; i < kSize; ++i) {
      const double direction = 0.9 * m[i] + 0.1 * gradient[i];
      p[i] = p[i] * rounded_decay - kRate * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
      m[i] = 0.99 * m[i] + 0.01 * gradient[i];
    }
  }
  for (size_t i = 0; i < kSize; ++i) {
    EXPECT_NEAR(chunk.masters(kSize)[i], p[i], 3e-6 * p[i]);  // 200 roundings
    EXPECT_NEAR(chunk.firsts(kSize)[i], m[i], 1e-6);
  }
}

TEST(Optimizer, SplitMasterFollowsFloat32BitForBit) {
  constexpr size_t kSize = 70001;  // several tasks, and an odd end
  Floats start;
  for (size_t i = 0; i < kSize; ++i) {
    start.push_back(random_normal(1, i) * std::pow(10.0f, static_cast<float>(i % 9) - 6));
  }
  const UpdateRun runs[] = {{0, 33000, false}, {33024, 50000}, {50176, kSize, false}};
  for (OptimizerSettings settings : all_settings()) {
    if (settings.master == MasterFormat::float32) continue;
    SCOPED_TRACE(describe(settings));
    TestChunk split(settings, start);
    settings.master = MasterFormat::float32;
    TestChunk wide(settings, start);
    for (uint64_t t = 1; t <= 4; ++t) {
      const UpdateStep step = one_rate(settings, 1e-3 / static_cast<double>(t), t, 0.37);
      const Floats gradient = bf16_values(100 * t, kSize, 4);
      wide.set_gradient(gradient);
      split.set_gradient(gradient);
      wide.update(step, runs, t == 1);
      split.update(step, runs, t == 1);
      ASSERT_TRUE(bits(split.masters(kSize)) == bits(wide.masters(kSize))) << "step " << t;
      const std::span moments(wide.state);
      const std::span split_state(split.state);
      ASSERT_TRUE(std::ranges::equal(moments, split_state.last(moments.size()))) << "step " << t;
    }
    EXPECT_NE(bits(wide.masters(kSize)), bits(start));
  }
}

TEST(Optimizer, DecayAppliesInItsRunsOnly) {
  // Without gradient and moments an update of AdamW is the decay alone.
  const OptimizerSettings settings{.weight_decay = 0.5};
  const UpdateStep step = one_rate(settings, 0.1, 1);
  const std::vector<std::vector<UpdateRun>> layouts = {
      {}, {{0, 768}}, {{0, 1}}, {{0, 256, false}, {256, 300}}, {{256, 511}, {512, 768, false}}};
  for (const auto& runs : layouts) {
    TestChunk chunk(settings, Floats(768, 2.0f));
    chunk.update(step, runs, true);
    const Floats masters = chunk.masters(768);
    for (uint64_t i = 0; i < 768; ++i) {
      bool inside = false;
      for (const UpdateRun& r : runs) inside |= r.decay && r.begin <= i && i < r.end;
      EXPECT_EQ(masters[i], inside ? 2.0f * 0.95f : 2.0f) << i;
    }
  }
}

TEST(Optimizer, GroupsHaveTheirOwnLearningRate) {
  const OptimizerSettings settings{.kind = OptimizerKind::sgd, .momentum = 0};
  const double rates[] = {0.5, 0.25, 0};
  TestChunk chunk(settings, Floats(768, 1.0f));
  chunk.set_gradient(Floats(768, 1.0f));
  const UpdateRun runs[] = {{0, 256, true, 1}, {256, 512, true, 0}, {512, 768, true, 2}};
  chunk.update(update_step(settings, rates, 1, 1.0), runs, true);
  EXPECT_EQ(chunk.masters(768)[255], 0.75f);
  EXPECT_EQ(chunk.masters(768)[256], 0.5f);
  EXPECT_EQ(chunk.masters(768)[512], 1.0f);
}

TEST(Optimizer, ZeroMomentsAreNotReadAndCoverFrozenParameters) {
  constexpr size_t kSize = 40000;
  const Floats start = bf16_values(5, kSize, 2), gradient = bf16_values(7, kSize, 3);
  for (const OptimizerSettings& settings : all_settings()) {
    SCOPED_TRACE(describe(settings));
    const bool coded = settings.state == StateFormat::int8;
    const uint64_t exact = coded ? 300 : 0;
    const UpdateRun runs[] = {{256, 300, true, 0, coded, 100}, {512, 35000}};
    TestChunk unread(settings, start, exact), zero(settings, start, exact);
    const StateLayout layout = state_layout(settings, unread.parameters, exact);
    std::fill(zero.state.begin() + static_cast<ptrdiff_t>(layout.remainder_bytes()),
              zero.state.end(), std::byte{0});
    unread.set_gradient(gradient);
    zero.set_gradient(gradient);
    const UpdateStep step = one_rate(settings, 1e-3, 1, 0.5);
    unread.update(step, runs, true);
    zero.update(step, runs, false);
    EXPECT_TRUE(unread.weight == zero.weight);
    EXPECT_TRUE(unread.state == zero.state);
    EXPECT_TRUE(std::isfinite(unread.masters(kSize)[600]));
    EXPECT_EQ(unread.masters(kSize)[100], start[100]);
    EXPECT_EQ(unread.masters(kSize)[35001], start[35001]);
  }
}

TEST(Optimizer, ClipFactorScalesTheGradient) {
  const Floats start = bf16_values(11, 100, 1), gradient = bf16_values(13, 100, 2);
  Floats halved = gradient;
  for (float& value : halved) value *= 0.5f;
  const UpdateRun runs[] = {{0, 100}};
  for (const OptimizerSettings& settings : all_settings()) {
    TestChunk clipped(settings, start), small(settings, start);
    clipped.set_gradient(gradient);
    small.set_gradient(halved);
    clipped.update(one_rate(settings, 1e-3, 1, 0.5), runs, true);
    small.update(one_rate(settings, 1e-3, 1, 1.0), runs, true);
    EXPECT_TRUE(clipped.state == small.state) << describe(settings);
    EXPECT_TRUE(clipped.weight == small.weight) << describe(settings);
  }
}

TEST(Optimizer, FirstStepMovesEveryWeightByTheLearningRate) {
  // Bias correction makes AdamW's m / sqrt(v) the gradient's sign at t = 1.
  const OptimizerSettings settings{.master = MasterFormat::float32};
  TestChunk chunk(settings, {1.0f, 1.0f, 1.0f});
  chunk.set_gradient({1e-3f, -5.0f, 7e4f});
  const UpdateRun runs[] = {{0, 3}};
  chunk.update(one_rate(settings, 0.25, 1), runs, true);
  const Floats weight = chunk.masters(3);
  EXPECT_NEAR(weight[0], 0.75, 3e-6);  // epsilon is 1e-5 of this gradient
  EXPECT_NEAR(weight[1], 1.25, 1e-6);
  EXPECT_NEAR(weight[2], 0.75, 1e-6);
}

TEST(Optimizer, CutIntoChunksGivesTheSameBits) {
  constexpr uint64_t kSize = 150 * kStateBlock - 100;
  constexpr uint64_t kCuts[] = {0, 256, 40 * 256, 140 * 256, kSize};
  const Floats start = bf16_values(21, kSize, 2);
  const auto part = [&](const Floats& values, size_t i) {
    return Floats(values.begin() + static_cast<ptrdiff_t>(kCuts[i]),
                  values.begin() + static_cast<ptrdiff_t>(kCuts[i + 1]));
  };
  for (const OptimizerSettings& settings : all_settings()) {
    SCOPED_TRACE(describe(settings));
    TestChunk whole(settings, start);
    whole.first = 7 * kStateBlock;
    std::vector<TestChunk> parts;
    for (size_t i = 0; i + 1 < std::size(kCuts); ++i) {
      parts.emplace_back(settings, part(start, i));
      parts.back().first = whole.first + kCuts[i];
    }
    for (uint64_t t = 1; t <= 3; ++t) {
      const UpdateStep step = one_rate(settings, 1e-3, t);
      const Floats gradient = bf16_values(30 + t, kSize, 3);
      const UpdateRun all[] = {{0, kSize}};
      whole.set_gradient(gradient);
      whole.update(step, all, t == 1);
      const Floats masters = whole.masters(kSize), firsts = whole.firsts(kSize),
                   seconds = whole.seconds(kSize);
      for (size_t i = 0; i < parts.size(); ++i) {
        const uint64_t size = kCuts[i + 1] - kCuts[i];
        const UpdateRun run[] = {{0, size}};
        parts[i].set_gradient(part(gradient, i));
        parts[i].update(step, run, t == 1);
        ASSERT_TRUE(bits(parts[i].masters(size)) == bits(part(masters, i))) << t << " " << i;
        ASSERT_TRUE(bits(parts[i].firsts(size)) == bits(part(firsts, i))) << t << " " << i;
        ASSERT_TRUE(bits(parts[i].seconds(size)) == bits(part(seconds, i))) << t << " " << i;
      }
    }
  }
}

TEST(Optimizer, RoundingDiffersBetweenSeedsStepsLayersAndBlocks) {
  const Floats start(512, 1.0f), gradient(512, 0.3f);
  const UpdateRun runs[] = {{0, 512}};
  const auto state_of = [&](uint64_t seed, uint64_t t, uint64_t layer) {
    const OptimizerSettings settings{.state = StateFormat::bfloat16, .seed = seed};
    TestChunk chunk(settings, start);
    chunk.layer = layer;
    chunk.set_gradient(gradient);
    chunk.update(one_rate(settings, 1e-3, t), runs, true);
    return chunk.firsts(512);
  };
  const Floats base = state_of(1, 1, 1);
  EXPECT_EQ(base, state_of(1, 1, 1));
  EXPECT_NE(base, state_of(2, 1, 1));
  EXPECT_NE(base, state_of(1, 2, 1));
  EXPECT_NE(base, state_of(1, 1, 2));
  EXPECT_NE(Floats(base.begin(), base.begin() + 256), Floats(base.begin() + 256, base.end()));
}

TEST(Optimizer, LayoutHasOnlyWhatTheOptimizerKeeps) {
  const auto bytes = [](OptimizerKind kind, StateFormat state, MasterFormat master,
                        double momentum = 0.9) {
    return state_layout({.kind = kind, .state = state, .master = master, .momentum = momentum}, 512,
                        0)
        .bytes;
  };
  using enum OptimizerKind;
  using enum StateFormat;
  EXPECT_EQ(bytes(adamw, float32, MasterFormat::split), 512u * 10);
  EXPECT_EQ(bytes(adamw, float32, MasterFormat::float32), 512u * 8);
  EXPECT_EQ(bytes(adamw, bfloat16, MasterFormat::split), 512u * 6);
  EXPECT_EQ(bytes(adamw, int8, MasterFormat::split), 512u * 4 + 4 * 4);
  EXPECT_EQ(bytes(lion, int8, MasterFormat::split), 512u * 3 + 2 * 4);
  EXPECT_EQ(bytes(sgd, bfloat16, MasterFormat::split, 0.0), 512u * 2);
  EXPECT_EQ(bytes(sgd, int8, MasterFormat::float32, 0.0), 0u);
  const StateLayout layout = state_layout({.state = int8}, 512, 10);
  EXPECT_EQ(layout.exact_second - layout.exact_first, 40u);
  EXPECT_EQ(layout.bytes, 512u * 4 + 16 + 80);
}

}  // namespace
}  // namespace overspill
