// What one execution of a Program is given and what it leaves behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"

namespace overspill {

struct StepContext {
  // Inputs.
  std::span<const int32_t> tokens;  ///< micro_batches * tokens of a micro-batch
  std::span<const int32_t> targets;
  /// Of each token as Model::block takes them; empty: every sequence is one document.
  std::span<const int32_t> document_begins;
  float loss_scale = 0;  ///< 1 / trained tokens of the whole step; never 0 in a backward
  UpdateStep update{};   ///< of the update that this Program applies

  // Results.
  std::vector<double> losses;            ///< summed over tokens, per micro-batch
  std::vector<double> gradient_squares;  ///< per layer
  /// Set by the first non-finite loss or gradient; updates later in the Program do nothing then.
  std::atomic<bool> non_finite{false};
};

}  // namespace overspill
