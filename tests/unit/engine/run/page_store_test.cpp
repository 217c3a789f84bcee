// How a store's memory is spread over groups of threads, and that it is zero before its first use.
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

TEST_F(PageStoreGroups, OneGroupNeedsNoParts) {
  const test::GroupsOfTest chosen({{.cpus = {}, .threads = 2}});
  EXPECT_TRUE(host_parts(layout()).empty());
}

TEST_F(PageStoreGroups, EveryArrayOfAnUpdateIsAPart) {
  const test::GroupsOfTest chosen({{.cpus = {}, .threads = 2}, {.cpus = {}, .threads = 2}});
  const Layout layout = this->layout();
  std::vector<ArenaPart> parts = host_parts(layout);
  const auto has = [&](uint64_t offset, uint64_t bytes) {
    return std::ranges::any_of(
        parts, [&](const ArenaPart& p) { return p.offset == offset && p.bytes == bytes; });
  };
  uint64_t largest = 0;
  for (const Chunk& chunk : layout.table.chunks) largest = std::max(largest, chunk.parameters);
  for (const SlotId id : layout.records) {
    const uint64_t at = layout.slot(id).offset, n = largest;
    EXPECT_TRUE(has(at, 2 * n)) << "remainders";
    EXPECT_TRUE(has(at + 2 * n, 4 * n)) << "exp_avg";
    EXPECT_TRUE(has(at + 6 * n, 4 * n)) << "exp_avg_sq";
  }
  for (uint32_t layer = 0; layer < layout.model.layers.size(); ++layer) {
    for (const PageId page : {layout.weight(layer, 0), layout.gradient(layer, 0)}) {
      EXPECT_TRUE(has(layout.slot(layout.page(page).home_slot).offset, layout.page(page).bytes));
    }
  }
  std::ranges::sort(parts, {}, &ArenaPart::offset);
  for (size_t i = 1; i < parts.size(); ++i) {
    EXPECT_LE(parts[i - 1].offset + parts[i - 1].bytes, parts[i].offset);
  }
  EXPECT_LE(parts.back().offset + parts.back().bytes, layout.host_bytes);
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
