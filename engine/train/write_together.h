// One safetensors file, or model, that all ranks fill. Every rank makes the same calls.
#pragma once

#include <vector>

#include "engine/collective/ranks.h"
#include "engine/model/safetensors.h"

namespace overspill {

/// The first rank creates what open(role) opens, the others join.
template <class Open>
auto open_together(const Ranks& ranks, const Open& open) {
  if (!ranks.first()) ranks.world().barrier();
  auto writer = open(ranks.first() ? WriterRole::creates : WriterRole::joins);
  if (ranks.first()) ranks.world().barrier();
  return writer;
}

/// When all ranks have written, the first one declares it whole.
template <class Writer>
void complete_together(const Ranks& ranks, Writer& writer) {
  const std::vector<uint64_t> own = writer.flush();
  const std::vector<uint64_t> all = ranks.gather(std::span(own));
  std::vector<uint64_t> written(own.size());
  for (size_t i = 0; i < all.size(); ++i) written[i % own.size()] += all[i];
  if (ranks.first()) writer.complete(written);
  ranks.world().barrier();
}

}  // namespace overspill
