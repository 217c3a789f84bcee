// What a fragment is asked to do: a Program of pieces of steps whose layers another program
// computes (engine/plan/fragment_planner.h). Pure data.
#pragma once

#include <cstdint>

#include "engine/program/program.h"

namespace overspill {

/// Where a layer's weights are in the ring, or shall be.
struct RingPlace {
  SlotId slot;           ///< none: the layer needs no place there
  bool present = false;  ///< the weights are there, as they were before the layer's pending update
};

struct FragmentPart {
  enum class Kind : uint8_t {
    bring,            ///< the layer's weights become readable
    update,           ///< the pending update alone
    finish_gradient,  ///< complete sums go to their pages or, with in_backward, into the update
    store_sums,       ///< incomplete sums go to their pages
    load_sums,        ///< and come back
  };
  Kind kind;
  uint32_t layer;
  RingPlace place{};
  SlotId sums{};
  bool updates = false;  ///< of bring and update: the pending update is applied
};

}  // namespace overspill
