// The vector kernels give the bits of the plain reference on every instruction set, in every
// format, with odd tails, several runs and exact moments, and however a chunk is cut.
#include "optim/update_kernels.h"

#include <gtest/gtest.h>

#include "tests/unit/optim/chunk_fixture.h"

namespace overspill {
namespace {

/// Frozen gaps, odd ends, a part of a block, other groups and no decay.
std::vector<UpdateRun> runs_of(const OptimizerSettings& settings, uint64_t* exact) {
  std::vector<UpdateRun> runs = {
      {0, 256},
      {256, 1025, false, 1},
      {2048, 2049},
      {2304, 2816 + 77, true, 1},
      {3072, 40000, true, 0},
  };
  *exact = 0;
  if (settings.state == StateFormat::int8) {
    for (const size_t i : {1, 2}) {
      runs[i].exact = true;
      runs[i].exact_begin = *exact;
      *exact += runs[i].end - runs[i].begin + 3;  // elements of frozen tensors between them
    }
  }
  return runs;
}

TEST(EveryTarget, EqualsTheReferenceBitForBit) {
  constexpr uint64_t kSize = 40000;
  const double rates[] = {3e-3, 7e-4};
  const std::vector<float> start = bf16_values(1, kSize, 3);
  for (const OptimizerSettings& settings : all_settings()) {
    uint64_t exact = 0;
    const std::vector<UpdateRun> runs = runs_of(settings, &exact);
    TestChunk want(settings, start, exact);
    TargetChunks got(want);
    for (uint64_t t = 1; t <= 3; ++t) {
      std::vector<float> gradient = bf16_values(10 * t, kSize, 5);
      // Some never move, some are zero for a step, a whole block is.
      for (size_t i = 0; i < kSize; i += 17) gradient[i] = 0;
      for (size_t i = t; i < kSize; i += 5) gradient[i] = 0;
      std::fill_n(gradient.begin() + 8192, 256, 0.0f);
      const UpdateStep step = update_step(settings, rates, t, 0.7);
      SCOPED_TRACE(describe(settings) + " step " + std::to_string(t));
      got.update(want, step, gradient, runs, t == 1);
    }
    EXPECT_NE(want.masters(256), std::vector<float>(start.begin(), start.begin() + 256));
    EXPECT_EQ(want.masters(2048)[1500], start[1500]);  // frozen
  }
}

TEST(EveryTarget, IncludesThePortableOne) {
  std::vector<std::string> names;
  for (const int64_t target : update_targets()) names.push_back(update_target_name(target));
  const std::string last = names.back();
  EXPECT_TRUE(last == "SCALAR" || last == "EMU128" || names.size() == 1) << last;
}

}  // namespace
}  // namespace overspill
