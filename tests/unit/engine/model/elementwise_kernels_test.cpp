// The host's norms, rotation, SwiGLU, loss, reductions and conversions against float64, at odd
// sizes and with extreme values; exp_fast over its whole range.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/model/fast_math.h"
#include "tests/unit/engine/base/parallel_groups.h"
#include "tests/unit/engine/model/llama_under_test.h"

namespace overspill {
namespace {

using namespace test;
using Floats = std::vector<float>;

const Kernels& k = host_kernels();

void expect_close(const Floats& got, const Doubles& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double scale = 0;
  for (const double value : want) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
  }
}

TEST(Kernels, RmsNormAndItsGradient) {
  for (const auto& [rows, d] : {std::pair<size_t, size_t>{1, 1}, {3, 7}, {17, 100}, {9, 1037}}) {
    const Floats x = normals(1, rows * d, 3), w = normals(2, d), dy = normals(3, rows * d);
    Floats y = nans(rows * d), rstd = nans(rows), dx = normals(4, rows * d), dw = nans(d);
    const Floats dx_start = dx;
    const WeightView weight{w.data(), DType::f32};
    k.rms_norm(x.data(), weight, 1e-5f, y.data(), rstd.data(), rows, d);
    k.rms_norm_gradient(x.data(), weight, rstd.data(), dy.data(), dx.data(), dw.data(), false, rows,
                        d);
    Doubles want_y(rows * d), want_dx(rows * d), want_dw(d);
    for (size_t r = 0; r < rows; ++r) {
      double squares = 0, along = 0;
      for (size_t i = r * d; i < (r + 1) * d; ++i) squares += double{x[i]} * x[i];
      const double root = 1 / std::sqrt(squares / double(d) + 1e-5);
      for (size_t i = 0; i < d; ++i) along += double{dy[r * d + i]} * w[i] * x[r * d + i];
      for (size_t i = 0; i < d; ++i) {
        const size_t at = r * d + i;
        want_y[at] = x[at] * root * w[i];
        want_dw[i] += double{dy[at]} * x[at] * root;
        want_dx[at] =
            dx_start[at] + root * (w[i] * dy[at] - x[at] * root * root * along / double(d));
      }
    }
    expect_close(y, want_y, 5e-7);
    expect_close(dx, want_dx, 1e-6);
    expect_close(dw, want_dw, 1e-6);
    Floats more = dw, wider = dx_start;
    k.rms_norm_gradient(x.data(), weight, rstd.data(), dy.data(), wider.data(), more.data(), true,
                        rows, d);
    for (double& value : want_dw) value *= 2;
    expect_close(more, want_dw, 1e-6);
  }
}

TEST(Kernels, RotateTurnsPairsAndBackAgain) {
  constexpr size_t kBatch = 2, kLength = 13, kHeads = 3, kDim = 10, kHalf = 5;
  const Floats start = normals(1, kBatch * kLength * kHeads * kDim);
  Floats table, x = start;
  Doubles want(start.begin(), start.end());
  const auto angle = [](size_t t, size_t j) { return 0.37 * double(t) / double(j + 1); };
  for (size_t t = 0; t < kLength; ++t) {
    for (size_t j = 0; j < kHalf; ++j) table.push_back(static_cast<float>(std::cos(angle(t, j))));
    for (size_t j = 0; j < kHalf; ++j) table.push_back(static_cast<float>(std::sin(angle(t, j))));
  }
  for (size_t head = 0; head < kBatch * kLength * kHeads; ++head) {
    for (size_t j = 0; j < kHalf; ++j) {
      const double a = start[head * kDim + j], b = start[head * kDim + j + kHalf];
      const double turn = angle(head / kHeads % kLength, j);
      want[head * kDim + j] = a * std::cos(turn) - b * std::sin(turn);
      want[head * kDim + j + kHalf] = b * std::cos(turn) + a * std::sin(turn);
    }
  }
  k.rotate(x.data(), table.data(), kBatch, kLength, kHeads, kDim, false);
  expect_close(x, want, 3e-7);
  k.rotate(x.data(), table.data(), kBatch, kLength, kHeads, kDim, true);
  expect_close(x, doubles_of(start), 3e-7);
}

TEST(Kernels, SwigluAndItsGradient) {
  constexpr size_t kSize = 70003;  // more than one task
  Floats gate = normals(1, kSize, 8), up = normals(2, kSize), dy = normals(3, kSize);
  gate[0] = 0, gate[1] = 80, gate[2] = -80, gate[3] = 1e4f, gate[4] = -1e4f, gate[5] = FLT_MAX;
  up[5] = 0.5f;
  Floats y = nans(kSize), dgate = gate, dup = up;
  k.swiglu(gate.data(), up.data(), y.data(), kSize);
  k.swiglu_gradient(dgate.data(), dup.data(), dy.data(), kSize);
  for (size_t i = 0; i < kSize; ++i) {
    const double g = gate[i], u = up[i], sigmoid = 1 / (1 + std::exp(-g));
    const double slope = sigmoid * (1 + g * (1 - sigmoid));
    ASSERT_NEAR(y[i], g * sigmoid * u, 1e-6 * (1e-6 + std::abs(g * sigmoid * u))) << g;
    // 1 - sigmoid cancels for large gates: absolute there.
    ASSERT_NEAR(dgate[i], dy[i] * u * slope, 4e-6 * std::abs(dy[i] * u)) << g;
    ASSERT_NEAR(dup[i], dy[i] * g * sigmoid, 1e-6 * (1e-6 + std::abs(dy[i] * g * sigmoid))) << g;
  }
}

TEST(Kernels, CrossEntropyAndItsGradient) {
  for (const size_t vocabulary : {size_t{1}, size_t{2}, size_t{17}, size_t{1003}}) {
    constexpr size_t kRows = 5;
    // Logits around 0, 80, 1e4 and -1e4: what is common to a row must not matter.
    Floats logits = normals(1, kRows * vocabulary, 3), loss = nans(kRows);
    const float offsets[kRows] = {0, 80, 1e4f, -1e4f, 0};
    for (size_t i = 0; i < logits.size(); ++i) logits[i] += offsets[i / vocabulary];
    const std::vector<int32_t> targets = random_tokens(2, kRows, vocabulary);
    Floats gradient = logits;
    k.cross_entropy(gradient.data(), targets.data(), 0.25f, loss.data(), kRows, vocabulary);
    for (size_t r = 0; r < kRows; ++r) {
      const float* row = logits.data() + r * vocabulary;
      const double most = *std::max_element(row, row + vocabulary);
      double total = 0;
      for (size_t v = 0; v < vocabulary; ++v) total += std::exp(row[v] - most);
      ASSERT_NEAR(loss[r], most - row[targets[r]] + std::log(total), 3e-6) << vocabulary;
      for (size_t v = 0; v < vocabulary; ++v) {
        const double p = std::exp(row[v] - most) / total;
        const double onehot = v == static_cast<size_t>(targets[r]) ? 1 : 0;
        ASSERT_NEAR(gradient[r * vocabulary + v], 0.25 * (p - onehot), 2e-7);
      }
    }
    Floats again = logits, scored = nans(kRows);
    k.cross_entropy(again.data(), targets.data(), 0, scored.data(), kRows, vocabulary);
    EXPECT_EQ(again, logits) << "without scale the logits stay";
    EXPECT_EQ(scored, loss);
  }
}

TEST(Kernels, CrossEntropyOfTokensThatAreNotTrained) {
  constexpr size_t kRows = 4, kVocabulary = 37;
  Floats logits = normals(1, kRows * kVocabulary, 3), loss = nans(kRows), all_loss = nans(kRows);
  std::vector<int32_t> targets = random_tokens(2, kRows, kVocabulary);
  Floats gradient = logits, all = logits;
  k.cross_entropy(all.data(), targets.data(), 0.25f, all_loss.data(), kRows, kVocabulary);
  targets[1] = targets[3] = kNotTrained;
  std::fill_n(logits.data() + kVocabulary, kVocabulary, NAN);  // whatever they are
  gradient = logits;
  k.cross_entropy(gradient.data(), targets.data(), 0.25f, loss.data(), kRows, kVocabulary);
  for (size_t r = 0; r < kRows; ++r) {
    const bool trained = targets[r] != kNotTrained;
    EXPECT_EQ(loss[r], trained ? all_loss[r] : 0.0f);
    for (size_t v = r * kVocabulary; v < (r + 1) * kVocabulary; ++v) {
      EXPECT_EQ(gradient[v], trained ? all[v] : 0.0f) << v;
    }
  }
  Floats again = logits;
  k.cross_entropy(again.data(), targets.data(), 0, loss.data(), kRows, kVocabulary);
  EXPECT_TRUE(std::isnan(again[kVocabulary])) << "without scale the logits stay";
  EXPECT_EQ(loss[1], 0.0f);
}

TEST(Kernels, CrossEntropyOfNonFiniteLogitsIsNotANumber) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    for (const size_t place : {size_t{0}, size_t{20}, size_t{36}}) {
      Floats logits = normals(1, 37), loss(1);
      logits[place] = bad;
      const int32_t target = 5;
      k.cross_entropy(logits.data(), &target, 0, loss.data(), 1, 37);
      EXPECT_FALSE(std::isfinite(loss[0])) << bad << " at " << place;
    }
  }
}

TEST(Kernels, EmbedAndItsGradientInRowOrder) {
  const Floats table = normals(1, 7 * 11), dy = normals(2, 4 * 11);
  const int32_t tokens[] = {6, 0, 6, 3};
  Floats y = nans(4 * 11), sums(7 * 11, 1.0f);
  k.embed(tokens, {table.data(), DType::f32}, y.data(), 4, 11);
  k.embed_gradient(tokens, dy.data(), sums.data(), 4, 11);
  for (size_t i = 0; i < 11; ++i) {
    EXPECT_EQ(y[i], table[6 * 11 + i]);
    EXPECT_EQ(y[3 * 11 + i], table[3 * 11 + i]);
    EXPECT_EQ(sums[6 * 11 + i], 1.0f + dy[i] + dy[2 * 11 + i]);
    EXPECT_EQ(sums[1 * 11 + i], 1.0f);
  }
}

TEST(Kernels, SumOfSquares) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{31}, size_t{65537}, size_t{200001}}) {
    Floats x = normals(1, size, 100);
    double want = 0;
    for (const float value : x) want += double{value} * value;
    const double got = k.sum_of_squares(x.data(), size);
    EXPECT_NEAR(got, want, 1e-13 * want);
    EXPECT_EQ(got, k.sum_of_squares(x.data(), size));
    if (size == 0) continue;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY}) {
      for (const size_t place : {size_t{0}, size / 2, size - 1}) {
        const float kept = x[place];
        x[place] = bad;
        EXPECT_FALSE(std::isfinite(k.sum_of_squares(x.data(), size))) << bad << " at " << place;
        x[place] = kept;
      }
    }
  }
  const Floats large(100, FLT_MAX);  // squares overflow float32, not the sum
  EXPECT_NEAR(k.sum_of_squares(large.data(), 100), 100.0 * FLT_MAX * FLT_MAX, 1e66);
}

TEST(Kernels, SquaresOfRowsAndColumns) {
  for (const auto& [rows, columns] :
       {std::pair<size_t, size_t>{1, 1}, {1, 50}, {70, 1}, {3, 5}, {33, 16}, {101, 79}}) {
    Floats x = normals(1, rows * columns, 100);
    x[0] = 1e25f;  // its square overflows float32
    Doubles want_rows(rows), want_columns(columns), got_rows(rows, NAN), got_columns(columns, NAN);
    for (size_t i = 0; i < x.size(); ++i) {
      want_rows[i / columns] += double{x[i]} * x[i];
      want_columns[i % columns] += double{x[i]} * x[i];
    }
    k.row_column_squares(x.data(), rows, columns, got_rows.data(), got_columns.data());
    for (size_t r = 0; r < rows; ++r) EXPECT_NEAR(got_rows[r], want_rows[r], 1e-13 * want_rows[r]);
    for (size_t c = 0; c < columns; ++c) {
      EXPECT_NEAR(got_columns[c], want_columns[c], 1e-13 * want_columns[c]);
    }
  }
}

TEST(Kernels, SquaresOfRowsAndColumnsDoNotDependOnThreads) {
  constexpr size_t kRows = 200, kColumns = 333;
  const Floats x = normals(1, kRows * kColumns, 100);
  const auto sums = [&](uint32_t threads) {
    const GroupsOfTest chosen({{.cpus = {}, .threads = threads}});
    Doubles all(kRows + kColumns);
    k.row_column_squares(x.data(), kRows, kColumns, all.data(), all.data() + kRows);
    return all;
  };
  EXPECT_EQ(sums(1), sums(7));
}

TEST(Kernels, FloatToBf16RoundsToNearestEven) {
  const auto one = [](float value) {
    uint16_t result;
    k.float_to_bf16(&value, &result, 1);
    return result;
  };
  EXPECT_EQ(one(1.0f), 0x3f80);
  EXPECT_EQ(one(1.0f + 0x1p-8f), 0x3f80);             // tie: to even, down
  EXPECT_EQ(one(1.0f + 3 * 0x1p-8f), 0x3f82);         // tie: to even, up
  EXPECT_EQ(one(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);  // above the tie
  EXPECT_EQ(one(-1.0f - 3 * 0x1p-8f), 0xbf82);
  EXPECT_EQ(one(FLT_MAX), 0x7f80);  // overflows to infinity, as IEEE 754 rounds
  EXPECT_EQ(one(-0.0f), 0x8000);
  EXPECT_EQ(one(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(one(-INFINITY), 0xff80);
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u}) {
    EXPECT_TRUE(std::isnan(bf16_to_float(one(std::bit_cast<float>(bits))))) << std::hex << bits;
  }
}

TEST(Kernels, FloatToBf16InPlaceEqualsOutOfPlace) {
  for (const size_t size : {size_t{1}, size_t{1023}, size_t{1025}, size_t{200003}}) {
    Floats x = normals(1, size);
    std::vector<uint16_t> apart(size);
    k.float_to_bf16(x.data(), apart.data(), size);
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(apart[i], float_to_bf16(x[i])) << i;
    k.float_to_bf16(x.data(), reinterpret_cast<uint16_t*>(x.data()), size);
    EXPECT_EQ(std::memcmp(x.data(), apart.data(), size * sizeof(uint16_t)), 0) << size;
  }
}

TEST(FastMath, ExpFastIsWithinItsBoundOverItsWholeRange) {
  double worst = 0;
  for (const float sign : {-1.0f, 1.0f}) {  // every 251st float of each sign
    for (uint32_t bits = 0;; bits += 251) {
      const float x = sign * std::bit_cast<float>(bits);
      if (x < -87.0f || x > 88.0f) break;
      const double want = std::exp(double{x});
      worst = std::max(worst, std::abs(exp_fast(x) - want) / want);
    }
  }
  EXPECT_LT(worst, 2e-7);
  RecordProperty("worst", fmt::format("{:.2e}", worst));
}

TEST(FastMath, ExpFastClampsAndKeepsNan) {
  EXPECT_EQ(exp_fast(0.0f), 1.0f);
  EXPECT_EQ(exp_fast(-0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(exp_fast(std::numeric_limits<float>::quiet_NaN())));
  for (const float high : {88.0f, 89.0f, FLT_MAX, INFINITY}) {
    EXPECT_EQ(exp_fast(high), exp_fast(88.0f)) << high;
  }
  for (const float low : {-87.0f, -88.0f, -FLT_MAX, -INFINITY}) {
    EXPECT_EQ(exp_fast(low), exp_fast(-87.0f)) << low;
  }
  EXPECT_TRUE(std::isfinite(exp_fast(INFINITY)));
  EXPECT_GE(exp_fast(-INFINITY), 0.0f);
}

}  // namespace
}  // namespace overspill
