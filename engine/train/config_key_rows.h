// Rows of the table of keys for common kinds of values. Private to engine/train.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/train/config_keys.h"

namespace overspill {

/// What a row says besides its name and range; `unset` where the default is not the field's value.
struct Words {
  std::string example;
  std::string text;
  std::string unset = "";
};

template <class T>
auto field(T TrainConfig::*member) {
  return [member](TrainConfig& config) -> T& { return config.*member; };
}
template <class T>
auto field(T OffloadConfig::*member) {
  return [member](TrainConfig& config) -> T& { return config.offload.*member; };
}
template <class T>
auto field(T IoOptions::*member) {
  return [member](TrainConfig& config) -> T& { return config.offload.io.*member; };
}

template <class Field>
using FieldType = std::remove_reference_t<std::invoke_result_t<Field, TrainConfig&>>;

/// T of std::optional<T>, and T itself otherwise.
template <class T>
struct Plain {
  using Type = T;
};
template <class T>
struct Plain<std::optional<T>> {
  using Type = T;
};

/// `words.unset`, or the value that a fresh TrainConfig has.
template <class Field>
std::string default_text(Field field, const Words& words) {
  using Type = FieldType<Field>;
  if constexpr (std::is_same_v<Type, typename Plain<Type>::Type>) {
    TrainConfig fresh;
    if (words.unset.empty()) return fmt::format("{}", field(fresh));
  }
  return words.unset;
}

/// How a field's value is spelt: numbers in the shortest form, a default as auto.
template <class Field>
std::function<std::string(const TrainConfig&)> spell_field(Field field) {
  return [field](TrainConfig config) {
    const auto& value = field(config);
    using Type = FieldType<Field>;
    if constexpr (std::is_same_v<Type, typename Plain<Type>::Type>) {
      return fmt::format("{}", value);
    } else {
      return value ? fmt::format("{}", *value) : std::string("auto");
    }
  };
}

template <class Field>
ConfigKey integer(const char* name, Field field, uint64_t low, uint64_t high, const Words& words) {
  const std::string accepted = high == UINT64_MAX
                                   ? fmt::format("an integer of at least {}", low)
                                   : fmt::format("an integer from {} to {}", low, high);
  return {name,
          accepted,
          default_text(field, words),
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) {
            field(config) = static_cast<typename Plain<FieldType<Field>>::Type>(
                value_integer(value, low, high));
          },
          spell_field(field)};
}

inline std::string range_text(const RealRange& range) {
  return fmt::format("a number {} {} and {} {}", range.low_open ? "above" : "of at least",
                     range.low, range.high_open ? "below" : "at most", range.high);
}

template <class Field>
ConfigKey real(const char* name, Field field, const RealRange& range, const Words& words) {
  return {name,
          range_text(range),
          default_text(field, words),
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) {
            field(config) = value_real(value, range);
          },
          spell_field(field)};
}

template <class Field>
ConfigKey boolean(const char* name, Field field, const char* text) {
  TrainConfig fresh;
  const bool usual = field(fresh);
  return {name,
          "true or false",
          usual ? "true" : "false",
          usual ? "false" : "true",
          text,
          [=](const ConfigValue& value, TrainConfig& config) { field(config) = value_bool(value); },
          spell_field(field)};
}

template <class Enum>
struct Choice {
  const char* name;
  Enum value;
};

template <class Enum>
std::string choices_text(const std::vector<Choice<Enum>>& choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i].name;
  }
  return text;
}

template <class Field>
ConfigKey choice(const char* name, Field field,
                 const std::vector<Choice<FieldType<Field>>>& choices, const Words& words) {
  TrainConfig fresh;
  std::string usual;
  std::vector<std::string> names;
  for (const auto& one : choices) {
    names.emplace_back(one.name);
    if (one.value == field(fresh)) usual = one.name;
  }
  return {name,
          choices_text(choices),
          usual,
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) {
            field(config) = choices[value_choice(value, names)].value;
          },
          [=](TrainConfig config) {
            for (size_t i = 0; i < choices.size(); ++i) {
              if (choices[i].value == field(config)) return names[i];
            }
            return std::string();
          }};
}

template <class Field>
ConfigKey byte_budget(const char* name, Field field, uint64_t low, const Words& words) {
  return {name,
          fmt::format("a byte size of at least {}, such as 16GiB or 24GB, or auto", low),
          words.unset,
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) {
            if (is_auto(value)) {
              field(config).reset();
            } else {
              field(config) = value_bytes(value, low, UINT64_MAX);
            }
          },
          spell_field(field)};
}

template <class Field>
ConfigKey path_key(const char* name, Field field, const Words& words) {
  return {name,
          "a path (relative ones start at the file's directory)",
          words.unset,
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) { field(config) = value_path(value); },
          [=](TrainConfig config) { return field(config).string(); }};
}

}  // namespace overspill
