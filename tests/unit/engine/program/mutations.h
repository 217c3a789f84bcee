// Ways of breaking a Program, each applied at every place: a verifier refuses all that change what
// the Program does. Each returns how many mutants were refused.
#pragma once

#include <functional>
#include <string>

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill::test {

struct Mutated {
  const Program& program;
  const Layout& layout;
  std::function<bool(const Program&)> accepts;
  /// Whether an op may do without a dependency, which is about when and not about what.
  std::function<bool(const Op&, OpId)> paces = [](const Op&, OpId) { return false; };
};

size_t without_dependencies(const Mutated& it);
size_t with_cycles(const Mutated& it);
size_t with_other_slots(const Mutated& it);
size_t with_shifted_accesses(const Mutated& it);
size_t with_other_pages(const Mutated& it);
size_t without_ops(const Mutated& it);
size_t swapped_in_lanes(const Mutated& it);
/// An op that waits for others comes first, and waits for nobody.
size_t moved_to_front(const Mutated& it);
/// An op of another kind, layer or index.
size_t with_other_ops(const Mutated& it);

}  // namespace overspill::test
