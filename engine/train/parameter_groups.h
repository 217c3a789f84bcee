// Which tensors train, and with which learning rate: sets LayerTensor::trainable and ::group by the
// tensors' Hugging Face names. Pure functions. A tied lm_head is no tensor of its own: it trains as
// model.embed_tokens does.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/model/layers.h"

namespace overspill {

/// Tensors whose name contains one of `modules` have this peak learning rate.
struct LrGroup {
  std::string name;
  std::vector<std::string> modules;
  double learning_rate = 0;
};

/// Why a pattern of `unfrozen_parameters` is not accepted; empty when it is.
std::string pattern_flaw(const std::string& pattern);

/// Freezes what no pattern of `unfrozen` matches from the name's start, its end being free (all
/// train without it), and numbers the groups of
/// learning rates: 0 is learning_rate's, i + 1 that of groups[i]. Throws Error(invalid_config) for
/// a pattern or module without a tensor, a tensor of two groups, and when nothing would train.
void apply_parameter_groups(ModelShape& model,
                            const std::optional<std::vector<std::string>>& unfrozen,
                            std::span<const LrGroup> groups);

/// "trains 12.3M of 1.1B parameters (5 tensors frozen)" when some are frozen, and a line for each
/// group of learning rates.
std::vector<std::string> describe_parameter_groups(const ModelShape& model,
                                                   std::span<const LrGroup> groups);

}  // namespace overspill
