// Names of enumerators in profiles, for their files and for reports of what fills them in.
#pragma once

#include <array>

#include "engine/plan/profile.h"

namespace overspill {

template <class Enum>
struct Named {
  const char* name;
  Enum value;
};

inline constexpr std::array<Named<OpKind>, 3> kComputeOps = {
    {{"forward", OpKind::forward}, {"backward", OpKind::backward}, {"loss", OpKind::loss}}};
inline constexpr std::array<Named<OptimizerKind>, 4> kOptimizers = {
    {{"adamw", OptimizerKind::adamw},
     {"lion", OptimizerKind::lion},
     {"sgd", OptimizerKind::sgd},
     {"adafactor", OptimizerKind::adafactor}}};
inline constexpr std::array<Named<StateFormat>, 3> kStateFormats = {
    {{"float32", StateFormat::float32},
     {"bfloat16", StateFormat::bfloat16},
     {"int8", StateFormat::int8}}};

}  // namespace overspill
