// The GPU's updates give the host's bits: weights, remainders, moments and scales over several
// steps, of every optimizer and format, and nothing beside the runs is written.
#include <algorithm>

#include "optim/cuda_update.h"
#include "tests/emulation/kernel_fixture.h"
#include "tests/unit/optim/chunk_fixture.h"

namespace overspill {
namespace {

using namespace test;

/// The host's chunk, and a copy of it on the device.
class BothChunks {
 public:
  explicit BothChunks(const TestChunk& chunk)
      : host_(chunk),
        weight_(chunk.weight, 0),
        state_(chunk.state, 0),
        gradient_(chunk.gradient, 0),
        averages_(chunk.averages, 0) {}

  /// Updates both.
  void update(const UpdateStep& step, const std::vector<float>& gradient,
              std::span<const UpdateRun> runs, bool zero) {
    host_.set_gradient(gradient);
    std::ranges::copy(host_.gradient, gradient_.data());
    UpdateChunk chunk = host_.view();
    chunk.weight = weight_.data();
    chunk.state = state_.data();
    chunk.gradient = gradient_.data();
    chunk.averages = averages_.data();
    cuda::update_chunk(nullptr, host_.settings, step, chunk, runs, zero);
    host_.update(step, runs, zero);
    EXPECT_TRUE(std::ranges::equal(host_.weight, bytes_of(weight_)));
    EXPECT_TRUE(std::ranges::equal(host_.state, bytes_of(state_)));
  }

 private:
  static std::span<const std::byte> bytes_of(const Array<std::byte>& array) {
    return {array.data(), array.size()};
  }

  TestChunk host_;
  Array<std::byte> weight_, state_, gradient_;
  Array<float> averages_;
};

class UpdateKernels : public KernelTest {
 protected:
  static std::vector<float> start(uint64_t size) { return bf16_values(GetParam() * 100, size, 3); }
  /// Exact in bf16. Blocks differ in size by powers of two down to where their scales end; some
  /// are zero, as are single values.
  static std::vector<float> gradient(uint64_t step, uint64_t size) {
    std::vector<float> values = bf16_values(GetParam() * 100 + step, size, 3);
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t block = i / kStateBlock;
      if (i % 97 == 0 || block % 7 == 3) values[i] = 0;
      values[i] = std::ldexp(values[i], -static_cast<int>(block % 5) * 25);
    }
    return values;
  }
};
INSTANTIATE_SEEDS(UpdateKernels);

constexpr double kRates[] = {1e-3, 3e-4};
constexpr double kClip = 0.7;

// The first step has moments of all parameters; those that are frozen later must not count.
TEST_P(UpdateKernels, HaveTheHostsBits) {
  constexpr uint64_t kParameters = 4096;
  const UpdateRun whole[] = {{.begin = 0, .end = kParameters}};
  for (const OptimizerSettings& settings : all_settings()) {
    SCOPED_TRACE(describe(settings));
    const bool exact = settings.state == StateFormat::int8;
    // Tails that are no multiple of a pack, both groups, with and without decay.
    const UpdateRun runs[] = {
        {.begin = 0, .end = 1001},
        {.begin = 1280, .end = 1281, .decay = false, .group = 1},
        {.begin = 1536, .end = 2099, .exact = exact, .exact_begin = exact ? 1u : 0},
        {.begin = 2304, .end = 2560, .group = 1, .exact = exact, .exact_begin = exact ? 564u : 0},
        {.begin = 2560, .end = 4096, .group = 1}};
    TestChunk chunk(settings, start(kParameters), exact ? 820 : 0);
    chunk.first = 7 * kStateBlock;
    BothChunks both(chunk);
    for (uint64_t t = 1; t <= 4; ++t) {
      SCOPED_TRACE(t);
      const auto some = t == 1 ? std::span<const UpdateRun>(whole) : runs;
      both.update(update_step(settings, kRates, t, kClip), gradient(t, kParameters), some, t == 1);
    }
  }
}

TEST_P(UpdateKernels, HaveTheHostsBitsAtEdges) {
  for (const uint64_t size : {1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049, 2305}) {
    const UpdateRun runs[] = {{.begin = 0, .end = size}};
    for (const OptimizerSettings& settings : all_settings()) {
      SCOPED_TRACE(describe(settings) + " of " + std::to_string(size));
      BothChunks both(TestChunk(settings, start(size)));
      for (uint64_t t = 1; t <= 2; ++t) {
        const std::vector<float> values = gradient(t, whole_blocks(size));
        both.update(update_step(settings, kRates, t, kClip), values, runs, t == 1);
      }
    }
  }
}

// The largest moments are the top levels: their codes must not round past the last.
TEST_P(UpdateKernels, KeepTheLargestOfABlock) {
  for (const OptimizerKind kind : kKinds) {
    OptimizerSettings settings{.kind = kind, .state = StateFormat::int8};
    settings.seed = GetParam();
    const UpdateRun runs[] = {{.begin = 0, .end = 2048}};
    std::vector<float> values(2048, 0x1.8p-60f);
    for (uint64_t i = 0; i < values.size(); ++i) {
      if (i % 3 == 0) values[i] = -values[i];
    }
    BothChunks both(TestChunk(settings, start(values.size())));
    for (uint64_t t = 1; t <= 3; ++t) {
      both.update(update_step(settings, kRates, t, 1.0), values, runs, t == 1);
    }
  }
}

// Matrices that begin before their chunk, cut in the middle of rows, and a vector behind them whose
// moments are aligned or not.
TEST_P(UpdateKernels, HaveTheHostsBitsOfFactoredMoments) {
  constexpr uint64_t kShapes[][2] = {{1, 1},   {3, 5},    {1000, 7}, {77, 64},
                                     {29, 65}, {2, 3000}, {3000, 1}, {23, 257}};
  for (const auto& [rows, columns] : kShapes) {
    for (const MasterFormat master : kMasters) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns));
      const OptimizerSettings settings{
          .kind = OptimizerKind::adafactor, .master = master, .weight_decay = 0.1};
      const FactoredMatrix matrix{.offset = 512, .rows = rows, .columns = columns, .first = 16};
      const uint64_t skipped = rows * columns / 2 / kStateBlock * kStateBlock;
      const uint64_t size = rows * columns - skipped, vector_at = whole_blocks(size);
      TestChunk chunk(settings, start(vector_at + 300), 300 + 17);
      chunk.first = matrix.offset + skipped;
      chunk.averages.resize(matrix.first + matrix.elements());
      for (uint64_t i = matrix.first; i <= matrix.mean(); ++i) {
        chunk.averages[i] = std::abs(random_normal(GetParam(), i)) * 1e-6f + 1e-30f;
      }
      const UpdateRun runs[] = {{.begin = 0, .end = size, .group = 1, .matrix = matrix},
                                {.begin = vector_at,
                                 .end = vector_at + 300,
                                 .decay = false,
                                 .exact = true,
                                 .exact_begin = rows % 2 == 0 ? 16u : 17u}};
      BothChunks both(chunk);
      for (uint64_t t = 1; t <= 2; ++t) {
        const std::vector<float> values = gradient(t, vector_at + 300);
        both.update(update_step(settings, kRates, t, kClip), values, runs, t == 1);
      }
    }
  }
}

}  // namespace
}  // namespace overspill
