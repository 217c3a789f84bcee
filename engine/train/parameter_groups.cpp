// Matches tensor names with patterns and modules.
#include "engine/train/parameter_groups.h"

#include <algorithm>

// g++ 12 warns wrongly about <regex> under AddressSanitizer (GCC bug 105562).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <regex>
#pragma GCC diagnostic pop

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

std::vector<LayerTensor*> tensors_of(ModelShape& model) {
  std::vector<LayerTensor*> tensors;
  for (LayerShape& layer : model.layers) {
    for (LayerTensor& tensor : layer.tensors) tensors.push_back(&tensor);
  }
  return tensors;
}

/// A few names to copy from, and what a tied model lacks.
std::string names_text(const ModelShape& model) {
  std::vector<std::string> names = {model.layers[0].tensors[0].name};
  if (model.layers.size() > 2 && model.layers[1].tensors.size() > kDown) {
    names.push_back(model.layers[1].tensors[kQuery].name);
    names.push_back(model.layers[1].tensors[kDown].name);
  }
  names.push_back(model.layers.back().tensors.back().name);
  const bool tied = model.config.tie_word_embeddings;
  return fmt::format(
      "the model's tensors are {}, ...{}", fmt::join(names, ", "),
      tied ? "; its lm_head is tied to model.embed_tokens and trains as that does" : "");
}

void freeze_all_but(ModelShape& model, const std::vector<std::string>& patterns) {
  const std::vector<LayerTensor*> tensors = tensors_of(model);
  for (LayerTensor* tensor : tensors) tensor->trainable = false;
  for (size_t i = 0; i < patterns.size(); ++i) {
    const std::string flaw = pattern_flaw(patterns[i]);
    if (!flaw.empty()) {
      fail(ErrorCode::invalid_config, "unfrozen_parameters[{}]: \"{}\", {}", i, patterns[i], flaw);
    }
    const std::regex pattern(patterns[i]);
    bool matched = false;
    for (LayerTensor* tensor : tensors) {
      const auto from_start = std::regex_constants::match_continuous;
      if (!std::regex_search(tensor->name, pattern, from_start)) continue;
      tensor->trainable = matched = true;
    }
    if (matched) continue;
    fail(ErrorCode::invalid_config,
         "unfrozen_parameters[{}]: \"{}\" matches no tensor's name from its start; {}", i,
         patterns[i], names_text(model));
  }
  if (std::ranges::any_of(model.layers, &LayerShape::trainable)) return;
  fail(ErrorCode::invalid_config,
       "unfrozen_parameters: every tensor is frozen, so there is nothing to train; name some, or "
       "remove the key to train all");
}

void put_in_group(LayerTensor& tensor, uint32_t group, std::span<const LrGroup> groups) {
  if (tensor.group != 0 && tensor.group != group) {
    fail(ErrorCode::invalid_config,
         "lr_groups: {} is in both \"{}\" and \"{}\"; make their modules more specific",
         tensor.name, groups[tensor.group - 1].name, groups[group - 1].name);
  }
  tensor.group = group;
}

}  // namespace

std::string pattern_flaw(const std::string& pattern) {
  static const std::regex kRows("\\[[0-9]*:[0-9]*\\]$");  // [:32000], [32000:], [0:32000]
  if (std::regex_search(pattern, kRows)) {
    return "which trains some rows of a tensor: tensors train whole or not at all; remove the "
           "range "
           "at its end";
  }
  try {
    const std::regex compiled(pattern);
  } catch (const std::regex_error& error) {
    return fmt::format("which is no regular expression ({})", error.what());
  }
  return "";
}

void apply_parameter_groups(ModelShape& model,
                            const std::optional<std::vector<std::string>>& unfrozen,
                            std::span<const LrGroup> groups) {
  if (unfrozen) freeze_all_but(model, *unfrozen);
  for (uint32_t g = 0; g < groups.size(); ++g) {
    for (const std::string& module : groups[g].modules) {
      bool matched = false;
      for (LayerTensor* tensor : tensors_of(model)) {
        if (tensor->name.find(module) == std::string::npos) continue;
        put_in_group(*tensor, g + 1, groups);
        matched = true;
      }
      if (matched) continue;
      fail(ErrorCode::invalid_config, "lr_groups[{}].modules: no tensor's name contains \"{}\"; {}",
           g, module, names_text(model));
    }
  }
}

std::vector<std::string> describe_parameter_groups(const ModelShape& model,
                                                   std::span<const LrGroup> groups) {
  uint64_t trained = 0;
  size_t frozen = 0;
  std::vector<uint64_t> parameters(groups.size() + 1);
  for (const LayerShape& layer : model.layers) {
    trained += layer.trainable_parameters();
    for (const LayerTensor& tensor : layer.tensors) {
      frozen += tensor.trainable ? 0 : 1;
      parameters[tensor.group] += tensor.trainable ? tensor.elements : 0;
    }
  }
  std::vector<std::string> lines;
  if (frozen > 0) {
    lines.push_back(fmt::format("trains {} of {} parameters ({} tensor{} frozen)",
                                format_count(trained), format_count(model.parameters()), frozen,
                                frozen == 1 ? "" : "s"));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    lines.push_back(fmt::format("lr group {}: {} parameters at {}", groups[g].name,
                                format_count(parameters[g + 1]), groups[g].learning_rate));
  }
  return lines;
}

}  // namespace overspill
