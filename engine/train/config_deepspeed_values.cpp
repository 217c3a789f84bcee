// How values of DeepSpeed's keys become values of ours. Whether they are in range is for our own
// keys to say.
#include <array>
#include <cctype>
#include <cmath>

#include "engine/base/error.h"
#include "engine/model/strict_json.h"
#include "engine/train/config_deepspeed_keys.h"

namespace overspill::deepspeed {
namespace {

using Settings = std::vector<DeepSpeedSetting>;
using nlohmann::ordered_json;

/// Whole numbers without a fraction, as our integers are written: JSON's 5e8 is one.
std::string number_text(const ordered_json& value) {
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  const bool whole = number == std::floor(number) && std::fabs(number) < 0x1p53;
  return whole ? fmt::format("{:.0f}", number) : fmt::format("{}", number);
}

YAML::Node scalar_node(const DeepSpeedEntry& entry, const ordered_json& value) {
  if (value.is_number()) return YAML::Node(number_text(value));
  if (value.is_boolean()) return YAML::Node(value.get<bool>() ? "true" : "false");
  if (!value.is_string()) refuse_entry(entry, "accepted: one value");
  YAML::Node node(value.get<std::string>());
  node.SetTag("!");  // as YAML marks what stands in quotes
  return node;
}

Settings set(std::string_view key, std::string_view text) {
  return {{std::string(key), YAML::Node(std::string(text))}};
}

bool boolean(const DeepSpeedEntry& entry) {
  if (!entry.value.is_boolean()) refuse_entry(entry, "accepted: true, false or \"auto\"");
  return entry.value.get<bool>();
}

std::string text_of(const DeepSpeedEntry& entry) {
  return entry.value.is_string() ? entry.value.get<std::string>() : std::string();
}

std::string lower_case(std::string text) {
  for (char& letter : text) {
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return text;
}

}  // namespace

Settings as_it_is(const DeepSpeedEntry& entry) {
  return {{std::string(entry.key->ours), scalar_node(entry, entry.value)}};
}

Settings betas(const DeepSpeedEntry& entry) {
  if (!entry.value.is_array() || entry.value.size() != 2) {
    refuse_entry(entry, "accepted: a list of two numbers, as in [0.9, 0.999], or \"auto\"");
  }
  return {{"adam_beta1", scalar_node(entry, entry.value[0])},
          {"adam_beta2", scalar_node(entry, entry.value[1])}};
}

Settings optimizer_type(const DeepSpeedEntry& entry) {
  const std::string type = lower_case(text_of(entry));
  if (type == "adam" || type == "adamw") return set("optimizer", "adamw");
  if (type == "lion" || type == "sgd") return set("optimizer", type);
  if (type.starts_with("onebit") || type.starts_with("zeroone")) {
    refuse_entry(entry,
                 "gradients are not compressed to one bit; write \"AdamW\", and `reduce_dtype: "
                 "bf16` in the YAML file for less traffic");
  }
  if (type == "adafactor") {
    refuse_entry(entry,
                 "its parameters differ from DeepSpeed's; remove the section and write `optimizer: "
                 "adafactor` in the YAML file");
  }
  refuse_entry(entry, "accepted: Adam or AdamW (both decay weights as AdamW), Lion or SGD");
}

Settings scheduler_type(const DeepSpeedEntry& entry) {
  const std::string type = text_of(entry);
  if (type == "WarmupLR") return set("lr_scheduler", "constant");
  if (type == "WarmupDecayLR") return set("lr_scheduler", "linear");
  if (type == "WarmupCosineLR") return set("lr_scheduler", "cosine");
  refuse_entry(entry,
               "accepted: WarmupLR, WarmupDecayLR or WarmupCosineLR; OneCycle and LRRangeTest have "
               "no counterpart");
}

Settings bf16_enabled(const DeepSpeedEntry& entry) {
  return set("precision", boolean(entry) ? "bf16" : "float32");
}

Settings bf16_states(const DeepSpeedEntry& entry) {
  return set("optimizer_state", boolean(entry) ? "bfloat16" : "float32");
}

Settings data_type(const DeepSpeedEntry& entry) {
  const std::string type = lower_case(text_of(entry));
  if (type == "fp32" || type == "float32") return set("reduce_dtype", "float32");
  if (type == "bf16" || type == "bfloat16") return set("reduce_dtype", "bf16");
  refuse_entry(entry, "accepted: \"fp32\" or \"bf16\"; float16 is not supported");
}

Settings float32_if_true(const DeepSpeedEntry& entry) {
  return boolean(entry) ? set(entry.key->ours, "float32") : Settings();
}

Settings host_if_true(const DeepSpeedEntry& entry) {
  return boolean(entry) ? set(entry.key->ours, "host") : Settings();
}

Settings device(const DeepSpeedEntry& entry) {
  const std::string device = text_of(entry);
  if (device == "cpu") return set(entry.key->ours, "host");
  if (device == "nvme") return set(entry.key->ours, "nvme");
  if (device == "none") return set(entry.key->ours, "device");
  refuse_entry(entry, "accepted: \"cpu\", \"nvme\" or \"none\"");
}

Settings nvme_path(const DeepSpeedEntry& entry) {
  if (!entry.value.is_string() || text_of(entry).empty()) {
    refuse_entry(entry, "accepted: a path, such as \"/mnt/nvme0\"");
  }
  const auto device = entry.section.find("device");
  if (device == entry.section.end() || *device != "nvme") return {};
  YAML::Node paths(YAML::NodeType::Sequence);
  paths.push_back(text_of(entry));
  return {{std::string(entry.key->ours), paths}};
}

Settings group_size(const DeepSpeedEntry& entry) {
  if (!entry.value.is_number_integer()) refuse_entry(entry, "accepted: a number of ranks");
  // MiCS writes -1; the parser makes what is not negative unsigned.
  const bool off = !entry.value.is_number_unsigned() || entry.value.get<uint64_t>() <= 1;
  return set(entry.key->ours, off ? "false" : entry.value.dump());
}

}  // namespace overspill::deepspeed
