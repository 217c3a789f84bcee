// Adafactor's factored second moment: the vector kernels against the plain reference on every
// instruction set, with cuts in the middle of rows; whole runs against the formulas in float64 and
// against transformers' numbers (tests/golden/adafactor_transformers.py).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "optim/update_kernels.h"
#include "tests/unit/optim/chunk_fixture.h"

namespace overspill {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

OptimizerSettings adafactor(MasterFormat master = MasterFormat::split) {
  return {.kind = OptimizerKind::adafactor, .master = master, .weight_decay = 0.1};
}

Floats random_averages(const FactoredMatrix& m, uint64_t key) {
  Floats averages(m.first + m.elements());
  for (uint64_t i = m.first; i <= m.mean(); ++i) {
    averages[i] = std::pow(10.0f, static_cast<float>(random_below(key, i, 20)) - 15);
  }
  averages[m.first] = 1e-30f;
  return averages;
}

/// A matrix that begins before its chunk, and a vector whose moments are exact.
TEST(AdafactorOnEveryTarget, EqualsTheReferenceBitForBit) {
  constexpr uint64_t kShapes[][2] = {{1, 1},    {3, 5},    {1000, 7},  {77, 64},
                                     {129, 65}, {2, 5000}, {40000, 1}, {101, 257}};
  for (const auto& [rows, columns] : kShapes) {
    for (const MasterFormat master : kMasters) {
      const FactoredMatrix matrix{.offset = 512, .rows = rows, .columns = columns, .first = 16};
      const uint64_t skipped = rows * columns / 2 / kStateBlock * kStateBlock;
      const uint64_t size = rows * columns - skipped, vector_at = whole_blocks(size);
      const uint64_t total = vector_at + 300;
      TestChunk want(adafactor(master), bf16_values(1, total, 3), 300 + 16);
      want.first = matrix.offset + skipped;
      want.averages = random_averages(matrix, rows);
      const std::vector<UpdateRun> runs = {
          {.begin = 0, .end = size, .group = 1, .matrix = matrix},
          {.begin = vector_at, .end = total, .decay = false, .exact = true, .exact_begin = 16}};
      const double rates[] = {3e-3, 7e-4};
      const Floats gradient = bf16_values(rows, total, 4);
      TargetChunks got(want);
      for (uint64_t t = 1; t <= 2; ++t) {
        const UpdateStep step = update_step(want.settings, rates, t, 0.7);
        SCOPED_TRACE(fmt::format("{}x{} {} step {}", rows, columns, describe(want.settings), t));
        got.update(want, step, gradient, runs, t == 1);
      }
    }
  }
}

TEST(Adafactor, CutsInTheMiddleOfRowsGiveTheSameBits) {
  constexpr uint64_t kRows = 90, kColumns = 333, kSize = kRows * kColumns;
  constexpr uint64_t kCuts[] = {0, 256, 40 * 256, 100 * 256, kSize};
  const FactoredMatrix matrix{.offset = 256, .rows = kRows, .columns = kColumns};
  const Floats start = bf16_values(21, kSize, 2), gradient = bf16_values(22, kSize, 3);
  const auto part = [](const Floats& values, uint64_t begin, uint64_t end) {
    return Floats(values.begin() + static_cast<ptrdiff_t>(begin),
                  values.begin() + static_cast<ptrdiff_t>(end));
  };
  const double rate = 1e-2;
  const UpdateStep step = update_step(adafactor(), std::span(&rate, 1), 3, 1.0);
  const auto updated = [&](uint64_t begin, uint64_t end) {
    TestChunk chunk(adafactor(), part(start, begin, end));
    chunk.first = matrix.offset + begin;
    chunk.averages = random_averages(matrix, 5);
    chunk.set_gradient(part(gradient, begin, end));
    const UpdateRun runs[] = {{.begin = 0, .end = end - begin, .matrix = matrix}};
    chunk.update(step, runs, false);
    return chunk.masters(end - begin);
  };
  const Floats whole = updated(0, kSize);
  EXPECT_NE(whole, start);
  for (size_t i = 0; i + 1 < std::size(kCuts); ++i) {
    EXPECT_TRUE(updated(kCuts[i], kCuts[i + 1]) == part(whole, kCuts[i], kCuts[i + 1])) << i;
  }
}

/// Sums of the squares of a matrix, as the engine's reduction leaves them.
void sum_squares(const Floats& gradient, const FactoredMatrix& m, Doubles& sums) {
  std::ranges::fill(sums, 0.0);
  for (uint64_t i = 0; i < m.rows * m.columns; ++i) {
    const double square = static_cast<double>(gradient[i]) * gradient[i];
    sums[m.first + i / m.columns] += square;
    sums[m.column_first() + i % m.columns] += square;
  }
}

/// A matrix, and a vector from the next block on, as the engine updates them.
class SmallRun {
 public:
  SmallRun(const OptimizerSettings& settings, const FactoredMatrix& matrix, const Floats& start)
      : size(start.size()),
        chunk_(settings, apart(matrix, start), start.size() - matrix.rows * matrix.columns),
        matrix_(matrix),
        sums_(matrix.elements()) {
    chunk_.averages.resize(matrix.elements());
    vector_at_ = whole_blocks(elements());
    runs_ = {{.begin = 0, .end = elements(), .matrix = matrix},
             {.begin = vector_at_,
              .end = vector_at_ + size - elements(),
              .decay = false,
              .exact = true}};
  }

  void step(const Floats& gradient, double rate, uint64_t t, double clip) {
    const UpdateStep step = update_step(chunk_.settings, std::span(&rate, 1), t, clip);
    sum_squares(gradient, matrix_, sums_);
    advance_moment({sums_.data(), chunk_.averages.data()}, matrix_, step);
    chunk_.set_gradient(apart(matrix_, gradient));
    chunk_.update(step, runs_, t == 1);
  }
  Floats masters() {
    Floats all = chunk_.masters(vector_at_ + size - elements());
    all.erase(all.begin() + static_cast<ptrdiff_t>(elements()),
              all.begin() + static_cast<ptrdiff_t>(vector_at_));
    return all;
  }
  const Floats& averages() const { return chunk_.averages; }
  Floats seconds() {
    const UpdateChunk view = chunk_.view();
    const ReferenceChunk values(chunk_.settings, view);
    Floats result;
    for (uint64_t i = 0; i < size - elements(); ++i) {
      result.push_back(element<float>(values.exact_second(), i));
    }
    return result;
  }

  const size_t size;

 private:
  uint64_t elements() const { return matrix_.rows * matrix_.columns; }
  static Floats apart(const FactoredMatrix& m, const Floats& values) {
    const auto end = values.begin() + static_cast<ptrdiff_t>(m.rows * m.columns);
    Floats result(values.begin(), end);
    result.resize(whole_blocks(result.size()));
    result.insert(result.end(), end, values.end());
    return result;
  }

  TestChunk chunk_;
  FactoredMatrix matrix_;
  Doubles sums_;
  uint64_t vector_at_ = 0;
  std::vector<UpdateRun> runs_;
};

/// The formulas of optimizer.h in float64.
struct Formula {
  Formula(const FactoredMatrix& matrix, const Floats& start)
      : m(matrix), p(start.begin(), start.end()), row(m.rows), column(m.columns) {
    v.resize(p.size() - m.rows * m.columns);
  }

  void step(const Floats& gradient, double rate, double wd, uint64_t t, double clip) {
    const double fresh = std::pow(static_cast<double>(t), -0.8), b = 1 - fresh;
    const auto square = [&](uint64_t i) { return std::pow(gradient[i] * clip, 2.0) + 1e-30; };
    for (double& value : row) value *= b;
    for (double& value : column) value *= b;
    for (uint64_t i = 0; i < m.rows * m.columns; ++i) {
      row[i / m.columns] += fresh * square(i) / static_cast<double>(m.columns);
      column[i % m.columns] += fresh * square(i) / static_cast<double>(m.rows);
    }
    double mean = 0;
    for (const double value : row) mean += value / static_cast<double>(m.rows);
    for (uint64_t i = 0; i < p.size(); ++i) {
      double second = 0;
      if (i < m.rows * m.columns) {
        second = row[i / m.columns] / mean * column[i % m.columns];
      } else {
        double& own = v[i - m.rows * m.columns];
        own = b * own + fresh * square(i);
        second = own;
      }
      if (i < m.rows * m.columns) p[i] *= 1 - rate * wd;
      p[i] -= rate * gradient[i] * clip / std::sqrt(second);
    }
  }

  FactoredMatrix m;
  Doubles p, row, column, v;
};

TEST(Adafactor, ThirtyStepsAreTheFormulas) {
  const FactoredMatrix matrix{.offset = 0, .rows = 7, .columns = 13};
  for (const MasterFormat master : kMasters) {
    SCOPED_TRACE(describe(adafactor(master)));
    Floats start = bf16_values(3, 7 * 13 + 5, 0);
    for (float& value : start) value += std::copysign(1.0f, value);  // none crosses zero
    SmallRun run(adafactor(master), matrix, start);
    Formula formula(matrix, start);
    for (uint64_t t = 1; t <= 30; ++t) {
      Floats gradient = bf16_values(100 + t, start.size(), 2);
      std::fill_n(gradient.begin(), 13, 0.0f);  // a row that never moves
      const double rate = 1e-3 * static_cast<double>(1 + t % 3), clip = t % 2 == 0 ? 0.25 : 1.0;
      run.step(gradient, rate, t, clip);
      formula.step(gradient, rate, 0.1, t, clip);
    }
    const Floats masters = run.masters(), averages = run.averages(), seconds = run.seconds();
    const auto expect_near = [](double got, double want) {
      EXPECT_NEAR(got, want, 1e-5 * std::abs(want));
    };
    for (size_t i = 0; i < start.size(); ++i) expect_near(masters[i], formula.p[i]);
    for (size_t i = 0; i < 7; ++i) expect_near(averages[i], formula.row[i]);
    for (size_t i = 0; i < 13; ++i) expect_near(averages[7 + i], formula.column[i]);
    for (size_t i = 0; i < 5; ++i) expect_near(seconds[i], formula.v[i]);
  }
}

TEST(Adafactor, ThirtyStepsAreTransformers) {
  std::ifstream stream(OVERSPILL_SOURCE_DIR "/tests/golden/adafactor_transformers.json");
  const nlohmann::json golden = nlohmann::json::parse(stream);
  const FactoredMatrix matrix{
      .offset = 0, .rows = golden.at("rows"), .columns = golden.at("columns")};
  for (const MasterFormat master : kMasters) {
    OptimizerSettings settings = adafactor(master);
    settings.weight_decay = golden.at("weight_decay");
    settings.adafactor_decay = golden.at("decay");
    SmallRun run(settings, matrix, golden.at("start").get<Floats>());
    uint64_t t = 0;
    for (const nlohmann::json& gradient : golden.at("gradients")) {
      run.step(gradient.get<Floats>(), golden.at("learning_rate"), ++t, 1.0);
      const auto kept = golden.at("weights").find(std::to_string(t));
      if (kept == golden.at("weights").end()) continue;
      const Floats want = kept->get<Floats>(), got = run.masters();
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 2e-6) << t << " " << i;
    }
    const auto expect_near = [&](const char* name, std::span<const float> got) {
      const Floats want = golden.at(name).get<Floats>();
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5 * want[i]) << name;
    };
    const std::span averages(run.averages());
    expect_near("exp_avg_sq_row", averages);
    expect_near("exp_avg_sq_col", averages.subspan(matrix.rows));
    expect_near("exp_avg_sq", run.seconds());
  }
}

TEST(Adafactor, HugeAndZeroGradientsLeaveWeightsFinite) {
  const FactoredMatrix matrix{.offset = 0, .rows = 4, .columns = 4};
  SmallRun run(adafactor(), matrix, Floats(20, 1.0f));
  run.step(Floats(20, 0.0f), 0.1, 1, 1.0);
  for (size_t i = 0; i < 20; ++i) EXPECT_NEAR(run.masters()[i], i < 16 ? 0.99 : 1.0, 1e-6);
  run.step(Floats(20, 1e30f), 0.1, 2, 1.0);
  for (const float weight : run.masters()) EXPECT_TRUE(std::isfinite(weight));
}

TEST(Adafactor, MatricesHaveNoBytesOfMoments) {
  EXPECT_EQ(state_layout(adafactor(), 512, 0).bytes, 512u * 2);
  EXPECT_EQ(state_layout(adafactor(MasterFormat::float32), 512, 0).bytes, 0u);
  const StateLayout layout = state_layout(adafactor(), 512, 32);
  EXPECT_EQ(layout.exact_second, layout.remainder_bytes());
  EXPECT_EQ(layout.bytes, 512u * 2 + 32 * 4);
}

}  // namespace
}  // namespace overspill
