// The same ways of breaking a Program on fragments as a pager has them planned, and ways of asking
// for what a fragment does not do, or at the wrong time.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine/base/error.h"
#include "engine/program/fragment_verifier.h"
#include "tests/unit/engine/plan/fragment_driver.h"
#include "tests/unit/engine/plan/test_models.h"
#include "tests/unit/engine/program/mutations.h"

namespace overspill {
namespace {

using Kind = FragmentPart::Kind;
using Parts = std::span<const FragmentPart>;

struct Case {
  const char* name;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
  void (*change)(PlanOptions&) = [](PlanOptions&) {};
};

void discrete(PlanOptions& o) { o.unified = false; }
void in_backward(PlanOptions& o) { o.update = UpdateTiming::in_backward; }
void paged(PlanOptions& o) { o.paged_sums.assign(4, true); }
void two_ranks(PlanOptions& o) {
  o.ranks = 2;
  o.rank = 1;
}

const Case kCases[] = {
    {"unified"},
    {"unified_paged", paged},
    {"discrete", discrete},
    {"discrete_paged",
     [](PlanOptions& o) {
       discrete(o);
       paged(o);
     }},
    {"state_on_device",
     [](PlanOptions& o) {
       discrete(o);
       paged(o);
       o.gradients = o.optimizer = Placement::device;
       o.weights = Placement::host;
     }},
    {"state_in_memory",
     [](PlanOptions& o) {
       discrete(o);
       paged(o);
       o.gradients = o.optimizer = Placement::host;
       o.precision = Precision::float32;
     }},
    {"in_backward", in_backward},
    {"in_backward_paged",
     [](PlanOptions& o) {
       in_backward(o);
       paged(o);
       o.precision = Precision::float32;
     }},
    {"in_backward_discrete",
     [](PlanOptions& o) {
       in_backward(o);
       discrete(o);
       paged(o);
       o.optimizer = Placement::device;
     }},
    {"zero_3",
     [](PlanOptions& o) {
       two_ranks(o);
       paged(o);
     }},
    {"zero_3_weights_in_memory",
     [](PlanOptions& o) {
       two_ranks(o);
       o.weights = Placement::host;
     }},
    {"zero_3_in_backward_discrete",
     [](PlanOptions& o) {
       two_ranks(o);
       in_backward(o);
       discrete(o);
     }},
    {"zero_2_discrete",
     [](PlanOptions& o) {
       two_ranks(o);
       discrete(o);
       o.shard_weights = false;
     }},
    {"zero_2_in_backward",
     [](PlanOptions& o) {
       two_ranks(o);
       in_backward(o);
       paged(o);
       o.shard_weights = false;
       o.replicas = 2;
     }},
    {"zero_0_in_backward",
     [](PlanOptions& o) {
       in_backward(o);
       o.replicas = 2;
     }},
};

/// A fragment, and what is known before it.
struct Fragment {
  Program program;
  std::vector<FragmentPart> parts;
  FragmentVerifier before;

  bool accepts(const Program& program, Parts parts) const {
    try {
      FragmentVerifier(before).verify(program, parts);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      return false;
    }
  }
};

class FragmentMutants : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    PlanOptions o = test::roomy_options();
    o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
    o.micro_batches = 0;
    o.compute_scratch_bytes = 0;
    o.prefetch_depth = 1;
    GetParam().change(o);
    if (in_backward() && o.paged_sums.empty()) o.gradients = Placement::automatic;
    layout_ = plan_layout(test::tiny_model(false, 2), o);
    collect();
    ASSERT_GT(fragments_.size(), 3u);
  }
  bool in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }

  /// Whether a part takes a place of the ring from another layer, whose weights nobody needs then.
  static bool evicts(Parts parts) {
    return std::ranges::any_of(parts, [&](const FragmentPart& a) {
      return std::ranges::any_of(parts, [&](const FragmentPart& b) {
        return a.layer != b.layer && a.place.slot == b.place.slot && a.place.slot != SlotId{};
      });
    });
  }

  /// Small fragments with parts of different kinds, of later steps too.
  void collect() {
    std::set<std::vector<int>> seen;
    test::FragmentDriver driver(
        layout_, 1, [&](const Program& program, Parts parts, FragmentVerifier& verifier) {
          std::vector<int> kinds;
          for (const FragmentPart& part : parts) {
            kinds.push_back(2 * static_cast<int>(part.kind) + part.updates);
          }
          std::ranges::sort(kinds);
          const bool fits =
              !program.ops.empty() && program.ops.size() < 90 && parts.size() < 4 && !evicts(parts);
          if (fits && fragments_.size() < 12 && seen.insert(kinds).second) {
            fragments_.push_back({program, {parts.begin(), parts.end()}, verifier});
          }
          verifier.verify(program, parts);
        });
    for (int step = 0; step < 12; ++step) driver.step();
  }

  /// The mutants of each fragment that were refused.
  size_t refused(size_t (*mutate)(const test::Mutated&)) const {
    size_t total = 0;
    for (const Fragment& fragment : fragments_) {
      total += mutate({fragment.program, layout_, [&](const Program& mutant) {
                         return fragment.accepts(mutant, fragment.parts);
                       }});
    }
    return total;
  }

  Layout layout_;
  std::vector<Fragment> fragments_;
};

INSTANTIATE_TEST_SUITE_P(Fragments, FragmentMutants, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(FragmentMutants, MissingDependency) { EXPECT_GT(refused(test::without_dependencies), 20u); }
TEST_P(FragmentMutants, Cycle) { EXPECT_GT(refused(test::with_cycles), 20u); }
TEST_P(FragmentMutants, SlotUsedTwice) { EXPECT_GT(refused(test::with_other_slots), 20u); }
TEST_P(FragmentMutants, ShiftedAccess) { EXPECT_GT(refused(test::with_shifted_accesses), 20u); }
TEST_P(FragmentMutants, OtherPage) { EXPECT_GT(refused(test::with_other_pages), 20u); }
TEST_P(FragmentMutants, MissingOp) { EXPECT_GT(refused(test::without_ops), 20u); }
TEST_P(FragmentMutants, SwappedInTheirLane) { EXPECT_GT(refused(test::swapped_in_lanes), 3u); }
TEST_P(FragmentMutants, MovedToTheFront) { EXPECT_GT(refused(test::moved_to_front), 20u); }
TEST_P(FragmentMutants, OtherOp) { EXPECT_GT(refused(test::with_other_ops), 20u); }

/// The same Program for another question.
TEST_P(FragmentMutants, OtherParts) {
  const auto layers = static_cast<uint32_t>(layout_.model.layers.size());
  size_t refused = 0;
  for (const Fragment& fragment : fragments_) {
    for (size_t p = 0; p < fragment.parts.size(); ++p) {
      const FragmentPart& part = fragment.parts[p];
      const auto expect_refused = [&](const char* what, const auto& change) {
        std::vector<FragmentPart> parts = fragment.parts;
        change(parts);
        EXPECT_FALSE(fragment.accepts(fragment.program, parts))
            << what << ": part " << p << " of " << parts.size();
        ++refused;
      };
      expect_refused("layer", [&](auto& parts) { parts[p].layer = (part.layer + 1) % layers; });
      const bool alone = std::ranges::count(fragment.parts, part.layer, &FragmentPart::layer) == 1;
      if (alone) expect_refused("gone", [&](auto& parts) { parts.erase(parts.begin() + p); });
      if (part.kind == Kind::bring || part.kind == Kind::update) {
        expect_refused("updates", [&](auto& parts) { parts[p].updates = !part.updates; });
        continue;
      }
      for (const SlotId slot : layout_.gradient_ring) {
        if (slot != part.sums) expect_refused("sums", [&](auto& parts) { parts[p].sums = slot; });
      }
      for (const Kind kind : {Kind::finish_gradient, Kind::store_sums, Kind::load_sums}) {
        if (kind != part.kind) expect_refused("kind", [&](auto& parts) { parts[p].kind = kind; });
      }
    }
  }
  EXPECT_GT(refused, 5u);
}

/// What a fragment counts on is not there.
TEST_P(FragmentMutants, AnotherTime) {
  for (const Fragment& fragment : fragments_) {
    const auto has = [&](Kind kind) {
      return std::ranges::count(fragment.parts, kind, &FragmentPart::kind) > 0;
    };
    const bool updates = std::ranges::count(fragment.parts, true, &FragmentPart::updates) > 0;
    const auto accepted_after = [&](const FragmentVerifier& before) {
      return Fragment{fragment.program, fragment.parts, before}.accepts(fragment.program,
                                                                        fragment.parts);
    };
    FragmentVerifier after = fragment.before;
    after.verify(fragment.program, fragment.parts);
    if (updates || has(Kind::finish_gradient) || has(Kind::load_sums)) {
      EXPECT_FALSE(accepted_after(after)) << "twice";
    }
    if (updates || has(Kind::load_sums)) {
      EXPECT_FALSE(accepted_after(FragmentVerifier(layout_))) << "at the beginning";
    }
  }
}

}  // namespace
}  // namespace overspill
