// The keys of the optimizer: rule, state, rates and clipping; which tensors train, and how fast.
#include <algorithm>
#include <array>

#include "engine/base/error.h"
#include "engine/train/config_key_rows.h"
#include "engine/train/parameter_groups.h"

namespace overspill {
namespace {

/// Names that other trainers give to optimizers with 8-bit state.
constexpr std::array kEightBit = {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit",
                                  "paged_lion_8bit"};

void apply_optimizer(const ConfigValue& value, TrainConfig& config) {
  static const std::vector<std::string> kNames = {"adamw", "adamw_torch", "adamw_torch_fused",
                                                  "lion",  "sgd",         "adafactor"};
  const std::string text = value_text(value);
  if (std::ranges::find(kEightBit, text) != kEightBit.end()) {
    refuse_value(value, fmt::format("{}, which is `optimizer: {}` with `optimizer_state: int8`",
                                    text, text.find("lion") == text.npos ? "adamw" : "lion"));
  }
  const std::string& name = kNames[value_choice(value, kNames)];
  config.optimizer = name == "lion"        ? OptimizerKind::lion
                     : name == "sgd"       ? OptimizerKind::sgd
                     : name == "adafactor" ? OptimizerKind::adafactor
                                           : OptimizerKind::adamw;
}

std::string spell_optimizer(const TrainConfig& config) {
  switch (config.optimizer) {
    case OptimizerKind::adamw: return "adamw";
    case OptimizerKind::lion: return "lion";
    case OptimizerKind::sgd: return "sgd";
    case OptimizerKind::adafactor: return "adafactor";
  }
  return "";
}

void apply_unfrozen(const ConfigValue& list, TrainConfig& config) {
  config.unfrozen_parameters.emplace();
  for (const ConfigValue& item : list_items(list)) {
    const std::string pattern = value_text(item);
    const std::string flaw = pattern_flaw(pattern);
    if (!flaw.empty()) refuse_value(item, fmt::format("\"{}\", {}", pattern, flaw));
    config.unfrozen_parameters->push_back(pattern);
  }
}

void apply_lr_group_name(const ConfigValue& value, TrainConfig& config) {
  const std::string name = value_text(value);
  const auto same = [&](const LrGroup& group) { return group.name == name; };
  if (std::ranges::any_of(config.lr_groups, same)) {
    refuse_value(value, fmt::format("\"{}\" a second time", name));
  }
  config.lr_groups.back().name = name;
}

void apply_lr_group_modules(const ConfigValue& value, TrainConfig& config) {
  for (const ConfigValue& item : list_items(value)) {
    config.lr_groups.back().modules.push_back(value_text(item));
  }
}

void apply_lr_groups(const ConfigValue& list, TrainConfig& config) {
  for (const ConfigValue& item : list_items(list)) {
    if (!item.node.IsMap()) refuse_value(item);
    config.lr_groups.emplace_back();
    apply_item(item, "lr_groups[].", lr_group_item_keys(), config);
    const LrGroup& group = config.lr_groups.back();
    const char* missing = group.name.empty()           ? "name"
                          : group.modules.empty()      ? "modules"
                          : group.learning_rate == 0.0 ? "lr"
                                                       : nullptr;
    if (missing == nullptr) continue;
    fail(ErrorCode::invalid_config,
         "{}: {}.{}: found nothing; every group needs name, modules and lr; write for example "
         "`- {{name: head, modules: [lm_head], lr: 1e-5}}`",
         item.where, item.path, missing);
  }
}

constexpr RealRange kRates = {0, 10, true};

}  // namespace

const std::vector<ConfigKey>& lr_group_item_keys() {
  static const std::vector<ConfigKey> kKeys = {
      {"lr_groups[].name", "a text, each once", "", "head", "What the log calls the group.",
       apply_lr_group_name},
      {"lr_groups[].modules", "a list of texts", "", "[lm_head]",
       "Tensors whose name contains one of these are in the group.", apply_lr_group_modules},
      {"lr_groups[].lr", range_text(kRates), "", "1e-5", "The group's peak learning rate.",
       [](const ConfigValue& value, TrainConfig& config) {
         config.lr_groups.back().learning_rate = value_real(value, kRates);
       }},
  };
  return kKeys;
}

void add_optimizer_keys(std::vector<ConfigKey>& keys) {
  keys.push_back({"optimizer",
                  "adamw (also spelt adamw_torch or adamw_torch_fused), lion, sgd or adafactor",
                  "adamw", "adamw", "The update rule.", apply_optimizer, spell_optimizer});
  keys.push_back(choice("optimizer_state", field(&TrainConfig::optimizer_state),
                        {{"float32", StateFormat::float32},
                         {"bfloat16", StateFormat::bfloat16},
                         {"int8", StateFormat::int8}},
                        {"int8",
                         "Format of the moments: bfloat16 and int8 (blocks of 256, small tensors "
                         "float32) move and keep less, rounded stochastically by seed and step. "
                         "Not for adafactor."}));
  keys.push_back(real("learning_rate", field(&TrainConfig::learning_rate), kRates,
                      {"2e-5", "Peak learning rate."}));
  keys.back().unset.clear();  // required
  keys.push_back({"lr_groups", "a list of mappings with name, modules and lr", "none",
                  "[{name: head, modules: [lm_head], lr: 1e-5}]",
                  "Tensors with another peak learning rate, on the same schedule.",
                  apply_lr_groups});
  keys.push_back({"unfrozen_parameters", "a list of regular expressions", "all are trained",
                  "['model.layers.1[0-9].', lm_head]",
                  "Train only tensors whose name one of these matches from its start; all others "
                  "are frozen.",
                  apply_unfrozen});
  keys.push_back(choice("lr_scheduler", field(&TrainConfig::lr_scheduler),
                        {{"constant", LrScheduler::constant},
                         {"linear", LrScheduler::linear},
                         {"cosine", LrScheduler::cosine}},
                        {"linear", "Shape after the warm-up; linear and cosine end at 0."}));
  keys.push_back(integer("warmup_steps", field(&TrainConfig::warmup_steps), 0, UINT64_MAX,
                         {"100", "Steps of linear warm-up; not together with warmup_ratio.", "0"}));
  keys.push_back(real("warmup_ratio", field(&TrainConfig::warmup_ratio), {0, 1},
                      {"0.03", "Warm-up as a part of all steps.", "0"}));
  keys.push_back(
      real("weight_decay", field(&TrainConfig::weight_decay), {0, 10},
           {"0.01", "Decoupled weight decay; sgd adds it to the gradient. Matrices only."}));
  keys.push_back(real("adam_beta1", field(&TrainConfig::adam_beta1), {0, 1, false, true},
                      {"0.9", "Decay of the first moment (adamw, lion)."}));
  keys.push_back(real("adam_beta2", field(&TrainConfig::adam_beta2), {0, 1, false, true},
                      {"0.95", "Decay of the second moment; lion: of the first."}));
  keys.push_back(real("adam_epsilon", field(&TrainConfig::adam_epsilon), {0, 1, true},
                      {"1e-8", "Added to the root of the second moment."}));
  keys.push_back(real("sgd_momentum", field(&TrainConfig::sgd_momentum), {0, 1, false, true},
                      {"0.9", "Momentum of sgd; 0 keeps no state."}));
  keys.push_back(real("adafactor_decay", field(&TrainConfig::adafactor_decay), {0, 1, true, true},
                      {"0.8", "Adafactor's second moment decays by 1 - t^-adafactor_decay."}));
  keys.push_back(real("max_grad_norm", field(&TrainConfig::max_grad_norm), {0, 1e9},
                      {"1.0", "Clip the global gradient norm to this; 0: no clipping."}));
}

}  // namespace overspill
