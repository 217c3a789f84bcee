// Where a store's slots are: near which group of threads, and zero before their first use.
#include "engine/run/page_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/fault/disk_fixture.h"
#include "tests/unit/engine/base/parallel_groups.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

class PageStoreGroups : public test::DiskTest {
 protected:
  /// Weights and gradients at home in host memory; optimizer state on NVMe passes through records.
  static Layout layout() {
    PlanOptions o = test::roomy_options();
    o.unified = false;
    o.weights = o.gradients = Placement::host;
    o.optimizer = o.activations = Placement::nvme;
    o.prefetch_depth = 1;
    return plan_layout(test::tiny_model(true), o);
  }
};

TEST_F(PageStoreGroups, OneGroupIsNearerToNoSlot) {
  const test::GroupsOfTest chosen({{.cpus = {}, .threads = 2}});
  const Layout layout = this->layout();
  const PageStore store(layout, {{root_}, {}});
  for (uint32_t i = 0; i < layout.slots.size(); ++i) EXPECT_EQ(store.group_of({i}), kAllGroups);
}

TEST_F(PageStoreGroups, HostSlotsTakeTurns) {
  const test::GroupsOfTest chosen({{.cpus = {}, .threads = 2}, {.cpus = {}, .threads = 2}});
  const Layout layout = this->layout();
  const PageStore store(layout, {{root_}, {}});
  for (uint32_t layer = 0; layer < layout.model.layers.size(); ++layer) {
    const SlotId weights = layout.page(layout.weight(layer, 0)).home_slot;
    const SlotId gradients = layout.page(layout.gradient(layer, 0)).home_slot;
    EXPECT_EQ(store.group_of(weights), layer % 2);
    EXPECT_EQ(store.group_of(gradients), layer % 2) << "an update needs both";
  }
  ASSERT_GE(layout.records.size(), 2u);
  for (uint32_t i = 0; i < layout.records.size(); ++i) {
    EXPECT_EQ(store.group_of(layout.records[i]), i % 2);
  }
  EXPECT_EQ(store.group_of(layout.scratch), kAllGroups) << "device memory serves all groups";
}

TEST_F(PageStoreGroups, MemoryIsZeroWhoeverTouchesIt) {
  const test::GroupsOfTest chosen({{.cpus = {}, .threads = 2}, {.cpus = {}, .threads = 2}});
  const Layout layout = this->layout();
  const PageStore store(layout, {{root_}, {}});
  for (uint32_t i = 0; i < layout.slots.size(); ++i) {
    const std::byte* const memory = store.address({i});
    const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
    EXPECT_TRUE(std::all_of(memory, memory + layout.slots[i].bytes, is_zero))
        << layout.slots[i].role;
  }
}

}  // namespace
}  // namespace overspill
