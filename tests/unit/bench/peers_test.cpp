// Other systems' schedules as Programs: they move the bytes that those systems move, and their
// simulated times stay as near to the published ones as bench/RESULTS.md says.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/peers/published.h"
#include "engine/plan/profile_file.h"

namespace overspill {
namespace {

HardwareProfile peers_machine(const char* name) {
  return load_profile(std::filesystem::path(OVERSPILL_SOURCE_DIR) / "bench/peers" / name);
}

double sum(const std::vector<uint64_t>& values) {
  double total = 0;
  for (const uint64_t value : values) total += static_cast<double>(value);
  return total;
}

void expect_ratio(double simulated, double published, double tolerance, const char* name) {
  EXPECT_NEAR(simulated / published, 1.0, tolerance) << name << ": " << simulated;
}

TEST(Peers, DeepSpeedModelsAreThePublishedOnes) {
  for (const DeepSpeedRow& row : deepspeed_rows()) {
    const Layout layout = deepspeed_layout(row);
    const std::vector<uint64_t> groups = deepspeed_groups(layout);
    expect_ratio(static_cast<double>(layout.model.parameters()), row.parameters, 1e-3, row.name);
    expect_ratio(static_cast<double>(std::ranges::max(groups)),
                 static_cast<double>(row.largest_group), 1e-3, row.name);
    expect_ratio(sum(groups) * layout.options.ranks, row.parameters, 1e-3, row.name);
  }
}

TEST(Peers, DeepSpeedFlushesGradientsAndMoves28BytesInTheUpdate) {
  Layout layout = deepspeed_layout(deepspeed_rows()[0]);
  for (const uint32_t micro_batches : {1u, 3u}) {
    layout.options.micro_batches = micro_batches;
    const Program program = deepspeed_step(layout, 8);
    const double parameters = sum(deepspeed_groups(layout));
    const auto bytes = [&](Lane lane) { return static_cast<double>(program.lane_bytes(lane)); };
    EXPECT_DOUBLE_EQ(bytes(Lane::nvme_read), 16 * parameters);
    EXPECT_DOUBLE_EQ(bytes(Lane::nvme_write), (4 + 12) * parameters);
    EXPECT_DOUBLE_EQ(bytes(Lane::d2h), 2 * micro_batches * parameters);
  }
}

TEST(Peers, DeepSpeedPhasesAreNearThePublished) {
  const HardwareProfile hardware = peers_machine("deepspeed.yaml");
  for (const DeepSpeedRow& row : deepspeed_rows()) {
    const PhaseSeconds s = simulate_deepspeed(hardware, row);
    expect_ratio(s.forward, row.published.forward, 0.22, row.name);
    expect_ratio(s.backward, row.published.backward, 0.03, row.name);
    expect_ratio(s.update, row.published.update, 0.08, row.name);
    expect_ratio(s.total(), row.published.total(), 0.07, row.name);
  }
}

TEST(Peers, LohanMovesModelStatesOnce) {
  const Layout layout = lohan_layout();
  const Program program = lohan_step(layout);
  uint64_t all = 0, blocks = 0;
  for (uint32_t l = 0; l <= layout.model.head(); ++l) {
    all += layout.shard(l);
    if (layout.model.layers[l].kind == LayerKind::block) blocks += layout.shard(l);
  }
  const uint64_t read_twice = blocks + layout.shard(0);
  EXPECT_EQ(program.lane_bytes(Lane::nvme_read), 14 * all + 2 * read_twice);
  EXPECT_EQ(program.lane_bytes(Lane::nvme_write), 14 * all);
}

TEST(Peers, LohanRatesAreNearThePublished) {
  const HardwareProfile hardware = peers_machine("lohan.yaml");
  for (const LohanRow& row : lohan_rows()) {
    const double seconds = simulate_lohan(with_drives(hardware, row.drives));
    expect_ratio(lohan_tflops(seconds), row.tflops, 0.15,
                 std::to_string(row.drives).append(" drives").c_str());
  }
}

TEST(Peers, OverspillMovesThreeQuartersOfDeepSpeedsBytes) {
  const HardwareProfile hardware = peers_machine("deepspeed.yaml");
  const DeepSpeedRow& row = deepspeed_rows()[0];
  const OverspillSeconds own = overspill_deepspeed(hardware, row);
  expect_ratio(own.spilled, 0.75 * simulate_deepspeed(hardware, row).total(), 0.02, row.name);
  EXPECT_LT(own.automatic, own.spilled);
}

}  // namespace
}  // namespace overspill
