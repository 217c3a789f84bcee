// Every way of breaking a Program that this file knows, applied at every place of real Programs:
// the verifier refuses all that change what a Program does.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>

#include "engine/base/error.h"
#include "engine/plan/planner.h"
#include "engine/program/dump.h"
#include "engine/program/verify.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

using test::roomy_options;
using test::tiny_model;

struct Case {
  const char* name;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
  bool tied = false;
  StepKind kind{true, true, true, false, 3};
  void (*change)(PlanOptions&) = [](PlanOptions&) {};
};

void discrete(PlanOptions& o) { o.unified = false; }
void twice(PlanOptions& o) { o.update_twice.assign(5, true); }
void in_backward(PlanOptions& o) {
  o.update = UpdateTiming::in_backward;
  o.gradients = Placement::automatic;
}
void two_ranks(PlanOptions& o) {
  o.ranks = 2;
  o.rank = 1;
}

const Case kCases[] = {
    {"unified"},
    {"discrete_tied", true, {true, true, true, false, 3}, discrete},
    {"first_update", false, {true, true, true, true, 2}, discrete},
    {"in_backward", false, {true, true, false, false, 2}, in_backward},
    {"in_backward_discrete",
     true,
     {true, true, false, true, 2},
     [](PlanOptions& o) {
       in_backward(o);
       o.unified = false;
       o.precision = Precision::float32;
     }},
    {"twice", false, {true, true, true, false, 3}, twice},
    {"twice_discrete",
     true,
     {true, true, true, true, 2},
     [](PlanOptions& o) {
       twice(o);
       o.unified = false;
     }},
    {"two_ranks", false, {true, true, true, false, 2}, two_ranks},
    {"middle_of_three_ranks_twice",
     true,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       twice(o);
       o.unified = false;
       o.ranks = 3;
       o.rank = 1;
     }},
    {"ranks_with_weights_in_memory",
     false,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       two_ranks(o);
       o.weights = Placement::host;
     }},
    {"state_in_memory",
     false,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       o.unified = false;
       o.weights = o.gradients = Placement::host;
       o.optimizer = Placement::device;
     }},
    {"flush", false, {false, false, true, false, 2}, discrete},
    {"evaluation", true, {true, false, false, false, 3}, discrete},
};

bool writes(const Access& access) { return access.mode != AccessMode::read; }

class Mutants : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    PlanOptions o = roomy_options();
    o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
    o.micro_batches = 3;
    o.prefetch_depth = 1;
    GetParam().change(o);
    layout_ = plan_layout(tiny_model(GetParam().tied), o);
    program_ = plan_step(layout_, GetParam().kind);
    ASSERT_TRUE(accepted(program_));
  }
  bool accepted(const Program& program) const { return accepted(program, layout_); }
  static bool accepted(const Program& program, const Layout& layout) {
    try {
      verify_program(program, layout);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      return false;
    }
  }
  /// A load that waits for the end of an earlier layer: about when, not about what.
  bool paces(const Op& op, OpId dep) const {
    const Op& before = program_.ops[dep.value];
    const bool loads = op.kind == OpKind::read || op.kind == OpKind::copy_to_device ||
                       op.kind == OpKind::all_gather;
    const bool ends_layer =
        before.lane == Lane::compute && before.index + 1 == program_.kind.micro_batches;
    // A flush has no compute; its layers end with the last op of their updates.
    return loads && (ends_layer || !program_.kind.forward);
  }
  /// Whether an op before `op` had the page in that place. Loads do not count on what older passes
  /// left in a slot; that an access finds it there, newest and whole, changes nothing.
  bool left_over(size_t op, PageId page, SlotId slot, uint64_t offset) const {
    for (size_t i = 0; i < op; ++i) {
      for (const Access& a : program_.accesses_of(program_.ops[i])) {
        uint64_t at = a.offset;
        for (uint32_t p = 0; p < a.page_count && a.slot == slot; ++p) {
          const PageId there{a.page.value + p};
          if (there == page && at == offset) return true;
          at += layout_.page(there).bytes;
        }
      }
    }
    return false;
  }
  /// Whether a transfer may lose one of its accesses to another place: what it brings was there, or
  /// what it takes was in the other place too.
  bool harmless(size_t op, const Access& right, SlotId other) const {
    const OpKind kind = program_.ops[op].kind;
    const bool transfers = kind == OpKind::read || kind == OpKind::write ||
                           kind == OpKind::copy_to_device || kind == OpKind::copy_to_host;
    const SlotId place = right.mode == AccessMode::write ? right.slot : other;
    return transfers && left_over(op, right.page, place, right.offset);
  }
  /// Whether two ops touch the same bytes or the same page on NVMe, one of them writing.
  bool conflict(const Op& a, const Op& b) const {
    for (const Access& x : program_.accesses_of(a)) {
      for (const Access& y : program_.accesses_of(b)) {
        const bool same_bytes =
            x.slot == y.slot && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes;
        if (same_bytes && (writes(x) || writes(y))) return true;
        const bool on_nvme = a.lane == Lane::nvme_write || b.lane == Lane::nvme_write;
        if (on_nvme && x.page == y.page && a.lane == b.lane) return true;
      }
    }
    return false;
  }
  std::string text(size_t op) const {
    const std::string dump = dump_program(program_, layout_);
    const size_t at = dump.find(fmt::format("\n{:>5} ", op)) + 1;
    return dump.substr(at, dump.find('\n', at) - at);
  }

  Layout layout_;
  Program program_;
};

INSTANTIATE_TEST_SUITE_P(Programs, Mutants, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Mutants, MissingDependency) {
  size_t refused = 0;
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    for (uint32_t d = 0; d < program_.ops[i].dep_count; ++d) {
      Program mutant = program_;
      Op& op = mutant.ops[i];
      std::swap(mutant.deps[op.first_dep + d], mutant.deps[op.first_dep + op.dep_count - 1]);
      --op.dep_count;
      const OpId dep = program_.deps_of(program_.ops[i])[d];
      if (!accepted(mutant)) {
        ++refused;
      } else {
        EXPECT_TRUE(paces(program_.ops[i], dep)) << dep.value << " of " << text(i);
      }
    }
  }
  EXPECT_GT(refused, 5u);
}

TEST_P(Mutants, Cycle) {
  for (size_t d = 0; d < program_.deps.size(); ++d) {
    const auto owner = std::ranges::find_if(program_.ops, [&](const Op& op) {
      return d >= op.first_dep && d < op.first_dep + op.dep_count;
    });
    const auto id = static_cast<uint32_t>(owner - program_.ops.begin());
    const auto last = static_cast<uint32_t>(program_.ops.size() - 1);
    for (const uint32_t target : {id, std::min(id + 1, last), last}) {
      Program mutant = program_;
      mutant.deps[d] = OpId{target};
      EXPECT_FALSE(accepted(mutant)) << target << " in " << text(id);
    }
  }
}

TEST_P(Mutants, SlotUsedTwice) {
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    const Op& op = program_.ops[i];
    for (uint32_t a = op.first_access; a < op.first_access + op.access_count; ++a) {
      const Access& right = program_.accesses[a];
      for (uint32_t s = 0; s < layout_.slots.size(); ++s) {
        const Slot& slot = layout_.slots[s];
        const bool possible = slot.memory == layout_.slot(right.slot).memory &&
                              right.offset + right.bytes <= slot.bytes;
        if (SlotId{s} == right.slot || !possible || slot.role == std::string("scratch")) continue;
        Program mutant = program_;
        mutant.accesses[a].slot = SlotId{s};
        EXPECT_TRUE(!accepted(mutant) || harmless(i, right, SlotId{s}))
            << "access " << a - op.first_access << " in slot " << s << " of " << text(i);
      }
    }
  }
}

TEST_P(Mutants, ShiftedAccess) {
  for (size_t i = 0; i < program_.ops.size(); ++i) {
    const Op& op = program_.ops[i];
    for (uint32_t a = op.first_access; a < op.first_access + op.access_count; ++a) {
      for (const uint64_t by : {uint64_t{4096}, layout_.slot(program_.accesses[a].slot).bytes}) {
        Program mutant = program_;
        mutant.accesses[a].offset += by;
        EXPECT_TRUE(!accepted(mutant) || harmless(i, program_.accesses[a], SlotId{}))
            << "by " << by << ": " << text(i);
      }
    }
  }
}

TEST_P(Mutants, MissingOp) {
  for (uint32_t gone = 0; gone < program_.ops.size(); ++gone) {
    Program mutant = program_;
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
          for (const OpId dep : program_.deps_of(program_.ops[gone])) add(dep);
        }
      }
      op.dep_count = static_cast<uint32_t>(mutant.deps.size()) - op.first_dep;
    }
    const auto touched = program_.accesses_of(program_.ops[gone]);
    const bool all_there =
        std::ranges::any_of(touched, writes) && std::ranges::all_of(touched, [&](const Access& a) {
          return !writes(a) || harmless(gone, a, SlotId{});
        });
    EXPECT_TRUE(!accepted(mutant) || all_there) << text(gone);
  }
}

TEST_P(Mutants, SwappedInTheirLane) {
  std::array<std::optional<uint32_t>, kLanes> previous;
  size_t refused = 0;
  for (uint32_t i = 0; i < program_.ops.size(); ++i) {
    std::optional<uint32_t>& before = previous[static_cast<size_t>(program_.ops[i].lane)];
    if (before) {
      Program mutant = program_;
      std::swap(mutant.ops[*before], mutant.ops[i]);
      for (OpId& dep : mutant.deps) {
        if (dep.value == i || dep.value == *before) dep.value = i + *before - dep.value;
      }
      if (accepted(mutant)) {
        EXPECT_FALSE(conflict(program_.ops[*before], program_.ops[i]))
            << text(*before) << " with " << text(i);
      } else {
        ++refused;
      }
    }
    before = i;
  }
  EXPECT_GT(refused, 3u);
}

TEST_P(Mutants, OverBudget) {
  for (size_t s = 0; s < layout_.slots.size(); ++s) {
    Layout mutant = layout_;
    mutant.slots[s].bytes += 4096;
    EXPECT_FALSE(accepted(program_, mutant)) << "overlaps, or leaves its arena";
    mutant = layout_;
    uint64_t& arena =
        mutant.slots[s].memory == Tier::device ? mutant.device_bytes : mutant.host_bytes;
    mutant.slots[s].offset = arena;
    arena += 64 * kMiB;
    EXPECT_FALSE(accepted(program_, mutant)) << "over the budget";
  }
  Layout mutant = layout_;
  mutant.options.nvme_capacity = layout_.nvme_bytes - 1;
  EXPECT_EQ(accepted(program_, mutant), false);
}

}  // namespace
}  // namespace overspill
