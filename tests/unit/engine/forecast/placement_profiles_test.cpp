// The search for placements of published shapes on the machines of profiles/.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/forecast/placement_search.h"
#include "engine/plan/placement.h"
#include "engine/plan/profile_file.h"
#include "tests/unit/engine/forecast/large_models.h"

namespace overspill {
namespace {

constexpr std::array<Placement, 2> kPlacements = {Placement::device, Placement::host};

/// Of published shapes on the machines of profiles/: no kind set by hand to one tier, the others
/// searched, makes a step more than a percent shorter.
TEST(PlacementSearch, IsNeverSlowerThanOneKindByHand) {
  struct Case {
    const char* profile;
    ModelShape model;
    uint32_t micro_batches;
    uint64_t device_gib, host_gib;
  };
  const std::array<Case, 2> cases = {
      {{"1x-h200", test::large_model(80, 8192, 28672, 64), 1, 125, 644},
       {"1x-rtx-4090-1-drive", test::large_model(32, 4096, 14336, 32), 8, 21, 107}}};
  for (const Case& c : cases) {
    const HardwareProfile hw =
        load_profile(fmt::format("{}/profiles/{}.yaml", OVERSPILL_SOURCE_DIR, c.profile));
    PlanOptions o;
    o.unified = false;
    o.nvme_available = true;
    o.nvme_files = hw.drives.count;
    o.sequence_len = o.micro_batch_tokens = 4096;
    o.micro_batches = c.micro_batches;
    o.compute_scratch_bytes = 4 * kGiB;
    o.device_memory = c.device_gib * kGiB;
    o.host_memory = c.host_gib * kGiB;
    const double seconds = solve_placement(c.model, o, hw).seconds;
    size_t tried = 0;
    for (const PlacedKind& kind : kPlacedKinds) {
      for (const Placement placement : kPlacements) {
        PlanOptions manual = o;
        manual.*kind.placement = placement;
        try {
          EXPECT_LE(seconds, 1.01 * solve_placement(c.model, manual, hw).seconds)
              << c.profile << " " << kind.key << " " << static_cast<int>(placement);
          ++tried;
        } catch (const Error& error) {
          if (error.code() != ErrorCode::does_not_fit) throw;
        }
      }
    }
    EXPECT_GT(tried, 3u) << c.profile;
  }
}

}  // namespace
}  // namespace overspill
