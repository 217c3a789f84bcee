// Mutants that nobody could tell from the Program itself are let pass.
#include "tests/unit/engine/program/mutations.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>

#include "engine/program/dump.h"

namespace overspill::test {
namespace {

bool writes(const Access& access) { return access.mode != AccessMode::read; }

/// Whether an op before `op` had the page in that place. Loads do not count on what older passes
/// left in a slot; that an access finds it there, newest and whole, changes nothing.
bool left_over(const Mutated& it, size_t op, PageId page, SlotId slot, uint64_t offset) {
  for (size_t i = 0; i < op; ++i) {
    for (const Access& a : it.program.accesses_of(it.program.ops[i])) {
      uint64_t at = a.offset;
      for (uint32_t p = 0; p < a.page_count && a.slot == slot; ++p) {
        const PageId there{a.page.value + p};
        if (there == page && at == offset) return true;
        at += it.layout.page(there).bytes;
      }
    }
  }
  return false;
}

/// Whether a transfer may lose one of its accesses to another place: what it brings was there, or
/// what it takes was in the other place too.
bool harmless(const Mutated& it, size_t op, const Access& right, SlotId other) {
  const OpKind kind = it.program.ops[op].kind;
  const bool transfers = kind == OpKind::read || kind == OpKind::write ||
                         kind == OpKind::copy_to_device || kind == OpKind::copy_to_host;
  const SlotId place = right.mode == AccessMode::write ? right.slot : other;
  return transfers && left_over(it, op, right.page, place, right.offset);
}

/// Whether all that an op brings was there.
bool needless(const Mutated& it, size_t op) {
  const auto touched = it.program.accesses_of(it.program.ops[op]);
  return std::ranges::any_of(touched, writes) && std::ranges::all_of(touched, [&](const Access& a) {
           return !writes(a) || harmless(it, op, a, SlotId{});
         });
}

/// Whether two ops touch the same bytes or the same page on NVMe, one of them writing.
bool conflict(const Mutated& it, const Op& a, const Op& b) {
  for (const Access& x : it.program.accesses_of(a)) {
    for (const Access& y : it.program.accesses_of(b)) {
      const bool same_bytes =
          x.slot == y.slot && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes;
      if (same_bytes && (writes(x) || writes(y))) return true;
      const bool on_nvme = a.lane == Lane::nvme_write || b.lane == Lane::nvme_write;
      if (on_nvme && x.page == y.page && a.lane == b.lane) return true;
    }
  }
  return false;
}

std::string text(const Mutated& it, size_t op) {
  const std::string dump = dump_program(it.program, it.layout);
  const size_t at = dump.find(fmt::format("\n{:>5} ", op)) + 1;
  return dump.substr(at, dump.find('\n', at) - at);
}

}  // namespace

size_t without_dependencies(const Mutated& it) {
  size_t refused = 0;
  for (size_t i = 0; i < it.program.ops.size(); ++i) {
    for (uint32_t d = 0; d < it.program.ops[i].dep_count; ++d) {
      Program mutant = it.program;
      Op& op = mutant.ops[i];
      std::swap(mutant.deps[op.first_dep + d], mutant.deps[op.first_dep + op.dep_count - 1]);
      --op.dep_count;
      const OpId dep = it.program.deps_of(it.program.ops[i])[d];
      if (!it.accepts(mutant)) {
        ++refused;
      } else {
        EXPECT_TRUE(it.paces(it.program.ops[i], dep)) << dep.value << " of " << text(it, i);
      }
    }
  }
  return refused;
}

size_t with_cycles(const Mutated& it) {
  size_t refused = 0;
  for (size_t d = 0; d < it.program.deps.size(); ++d) {
    const auto owner = std::ranges::find_if(it.program.ops, [&](const Op& op) {
      return d >= op.first_dep && d < op.first_dep + op.dep_count;
    });
    const auto id = static_cast<uint32_t>(owner - it.program.ops.begin());
    const auto last = static_cast<uint32_t>(it.program.ops.size() - 1);
    for (const uint32_t target : {id, std::min(id + 1, last), last}) {
      Program mutant = it.program;
      mutant.deps[d] = OpId{target};
      const bool accepted = it.accepts(mutant);
      EXPECT_FALSE(accepted) << target << " in " << text(it, id);
      refused += !accepted;
    }
  }
  return refused;
}

size_t with_other_slots(const Mutated& it) {
  size_t refused = 0;
  for (size_t i = 0; i < it.program.ops.size(); ++i) {
    const Op& op = it.program.ops[i];
    for (uint32_t a = op.first_access; a < op.first_access + op.access_count; ++a) {
      const Access& right = it.program.accesses[a];
      for (uint32_t s = 0; s < it.layout.slots.size(); ++s) {
        const Slot& slot = it.layout.slots[s];
        const bool possible = slot.memory == it.layout.slot(right.slot).memory &&
                              right.offset + right.bytes <= slot.bytes;
        if (SlotId{s} == right.slot || !possible || slot.role == std::string("scratch")) continue;
        Program mutant = it.program;
        mutant.accesses[a].slot = SlotId{s};
        const bool accepted = it.accepts(mutant);
        EXPECT_TRUE(!accepted || harmless(it, i, right, SlotId{s}))
            << "access " << a - op.first_access << " in slot " << s << " of " << text(it, i);
        refused += !accepted;
      }
    }
  }
  return refused;
}

size_t with_shifted_accesses(const Mutated& it) {
  size_t refused = 0;
  for (size_t i = 0; i < it.program.ops.size(); ++i) {
    const Op& op = it.program.ops[i];
    for (uint32_t a = op.first_access; a < op.first_access + op.access_count; ++a) {
      const Access& right = it.program.accesses[a];
      for (const uint64_t by : {uint64_t{4096}, it.layout.slot(right.slot).bytes}) {
        Program mutant = it.program;
        mutant.accesses[a].offset += by;
        const bool accepted = it.accepts(mutant);
        EXPECT_TRUE(!accepted || harmless(it, i, right, SlotId{}))
            << "by " << by << ": " << text(it, i);
        refused += !accepted;
      }
    }
  }
  return refused;
}

size_t with_other_pages(const Mutated& it) {
  size_t refused = 0;
  for (size_t i = 0; i < it.program.ops.size(); ++i) {
    const Op& op = it.program.ops[i];
    for (uint32_t a = op.first_access; a < op.first_access + op.access_count; ++a) {
      const PageId right = it.program.accesses[a].page;
      for (const uint32_t page : {right.value - 1, right.value + 1}) {
        if (page >= it.layout.pages.size()) continue;
        Program mutant = it.program;
        mutant.accesses[a].page.value = page;
        const bool accepted = it.accepts(mutant);
        EXPECT_FALSE(accepted) << "page " << page << ": " << text(it, i);
        refused += !accepted;
      }
    }
  }
  return refused;
}

size_t without_ops(const Mutated& it) {
  size_t refused = 0;
  for (uint32_t gone = 0; gone < it.program.ops.size(); ++gone) {
    Program mutant = it.program;
    mutant.ops.erase(mutant.ops.begin() + gone);
    // Who waited for it waits for what it waited for.
    const std::vector<OpId> deps = mutant.deps;
    mutant.deps.clear();
    for (Op& op : mutant.ops) {
      const uint32_t first = op.first_dep, count = op.dep_count;
      op.first_dep = static_cast<uint32_t>(mutant.deps.size());
      for (uint32_t d = first; d < first + count; ++d) {
        const auto add = [&](OpId dep) {
          mutant.deps.push_back({dep.value - (dep.value > gone ? 1 : 0)});
        };
        if (deps[d].value != gone) {
          add(deps[d]);
        } else {
          for (const OpId dep : it.program.deps_of(it.program.ops[gone])) add(dep);
        }
      }
      op.dep_count = static_cast<uint32_t>(mutant.deps.size()) - op.first_dep;
    }
    const bool accepted = it.accepts(mutant);
    EXPECT_TRUE(!accepted || needless(it, gone)) << text(it, gone);
    refused += !accepted;
  }
  return refused;
}

size_t swapped_in_lanes(const Mutated& it) {
  size_t refused = 0;
  std::array<std::optional<uint32_t>, kLanes> previous;
  for (uint32_t i = 0; i < it.program.ops.size(); ++i) {
    std::optional<uint32_t>& before = previous[static_cast<size_t>(it.program.ops[i].lane)];
    if (before) {
      Program mutant = it.program;
      std::swap(mutant.ops[*before], mutant.ops[i]);
      for (OpId& dep : mutant.deps) {
        if (dep.value == i || dep.value == *before) dep.value = i + *before - dep.value;
      }
      if (it.accepts(mutant)) {
        EXPECT_FALSE(conflict(it, it.program.ops[*before], it.program.ops[i]))
            << text(it, *before) << " with " << text(it, i);
      } else {
        ++refused;
      }
    }
    before = i;
  }
  return refused;
}

size_t moved_to_front(const Mutated& it) {
  size_t refused = 0;
  for (uint32_t moved = 1; moved < it.program.ops.size(); ++moved) {
    if (it.program.ops[moved].dep_count == 0) continue;
    Program mutant = it.program;
    const auto op = mutant.ops.begin() + moved;
    op->dep_count = 0;
    std::rotate(mutant.ops.begin(), op, op + 1);
    for (OpId& dep : mutant.deps) {
      if (dep.value <= moved) dep.value = dep.value == moved ? 0 : dep.value + 1;
    }
    const bool accepted = it.accepts(mutant);
    EXPECT_TRUE(!accepted || needless(it, moved)) << text(it, moved);
    refused += !accepted;
  }
  return refused;
}

size_t with_other_ops(const Mutated& it) {
  size_t refused = 0;
  const auto expect_refused = [&](size_t op, const auto& change) {
    Program mutant = it.program;
    change(mutant.ops[op]);
    const bool accepted = it.accepts(mutant);
    EXPECT_FALSE(accepted) << text(it, op);
    refused += !accepted;
  };
  const auto layers = static_cast<uint32_t>(it.layout.model.layers.size());
  for (size_t i = 0; i < it.program.ops.size(); ++i) {
    const OpKind right = it.program.ops[i].kind;
    for (auto kind = static_cast<uint8_t>(OpKind::read);
         kind <= static_cast<uint8_t>(OpKind::agree); ++kind) {
      if (static_cast<OpKind>(kind) == right) continue;
      expect_refused(i, [&](Op& op) { op.kind = static_cast<OpKind>(kind); });
    }
    expect_refused(i, [&](Op& op) { op.layer = (op.layer + 1) % layers; });
    const bool of_chunk = right != OpKind::all_gather && right != OpKind::reduce_scatter &&
                          right != OpKind::all_reduce && right != OpKind::reduce_gradient &&
                          right != OpKind::agree;
    if (of_chunk) expect_refused(i, [](Op& op) { ++op.index; });
  }
  return refused;
}

}  // namespace overspill::test
