// The search for placements against all placements of small models, against grids and random ones
// of large models, and against what a user could set by hand.
#include "engine/forecast/placement_search.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "engine/base/error.h"
#include "engine/forecast/forecast.h"
#include "engine/plan/placement.h"
#include "engine/plan/planner.h"
#include "engine/program/verify.h"
#include "engine/run/simulator.h"
#include "tests/unit/engine/forecast/large_models.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

constexpr std::array<Tier, 3> kTiers = {Tier::device, Tier::host, Tier::nvme};
constexpr std::array<Placement, 3> kPlacements = {Placement::device, Placement::host,
                                                  Placement::nvme};

struct Outcome {
  double seconds, score;
  uint64_t written;
};

/// Of a steady step as the run would plan it; nothing where it does not fit. Settled options only.
std::optional<Outcome> outcome(const ModelShape& model, const PlanOptions& options,
                               const HardwareProfile& hardware) {
  try {
    const Layout layout = plan_layout(model, options);
    const Program program = plan_step(layout, steady_step(options));
    const Trace trace = simulate(program, cost_model(hardware, layout, options.ranks));
    double state = 0;
    for (const Page& page : layout.pages) {
      const bool counts = page.kind == PageKind::weight || page.kind == PageKind::optimizer ||
                          page.kind == PageKind::gradient;
      if (counts) state += static_cast<double>(page.bytes);
    }
    const uint64_t written = program.lane_bytes(Lane::nvme_write);
    const double seconds = static_cast<double>(trace.end_ns()) * 1e-9;
    const double traffic = kWriteWeight * static_cast<double>(written) +
                           kReadWeight * static_cast<double>(program.lane_bytes(Lane::nvme_read));
    return Outcome{seconds, seconds * (1 + traffic / state), written};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::does_not_fit) throw;
    return std::nullopt;
  }
}

/// Drives, link and compute take about as long as each other for a tiny model; no latencies.
HardwareProfile even_profile() {
  HardwareProfile hw;
  hw.drives = {.read = 2e8, .write = 2e8, .mixed_read = 2e8, .mixed_write = 2e8, .latency = 0};
  hw.link = {.h2d = 4e8, .d2h = 4e8, .both_h2d = 4e8, .both_d2h = 4e8, .latency = 0};
  hw.host.update_latency = 0;
  hw.device.accelerator = true;
  hw.device.peak_flops = 2e9;
  hw.device.memory_bandwidth = 1e10;
  return hw;
}

struct Machine {
  const char* name;
  HardwareProfile hardware;
};

std::vector<Machine> machines() {
  std::vector<Machine> list = {{"even", even_profile()},         {"slow writes", even_profile()},
                               {"slow reads", even_profile()},   {"slow link", even_profile()},
                               {"slow compute", even_profile()}, {"shared drives", even_profile()}};
  list[1].hardware.drives.write = list[1].hardware.drives.mixed_write = 5e7;
  list[2].hardware.drives.read = list[2].hardware.drives.mixed_read = 5e7;
  list[3].hardware.link = {.h2d = 1e8, .d2h = 1e8, .both_h2d = 1e8, .both_d2h = 1e8, .latency = 0};
  list[4].hardware.device.peak_flops = 3e8;
  list[5].hardware.drives.mixed_read = list[5].hardware.drives.mixed_write = 1e8;
  return list;
}

/// Three layers with less memory than they need, nothing open but homes.
PlanOptions tight(bool unified, uint64_t host_kib, uint64_t device_kib) {
  PlanOptions o = test::roomy_options();
  o.unified = unified;
  o.compute_scratch_bytes = 0;
  o.host_memory = host_kib * kKiB;
  o.device_memory = device_kib * kKiB;
  o.prefetch_depth = 1;
  o.chunk_parameters = 16384;
  return o;
}

struct Gap {
  double score = 0, seconds = 0;  ///< relative, at most 0 where nothing better exists
  size_t placements = 0;
};

/// Of the search to the best of all homes of the open kinds in `tiers`, updated twice or not.
Gap gap_to_best(const ModelShape& model, const PlanOptions& open, const HardwareProfile& hardware,
                std::span<const Tier> tiers) {
  const PlacementChoice choice = solve_placement(model, open, hardware);
  const Outcome found = outcome(model, choice.options, hardware).value();
  const size_t layers = model.layers.size();
  std::vector<Tier*> homes;
  PlanOptions o = choice.options;
  for (const PlacedKind& kind : kPlacedKinds) {
    std::vector<Tier>& tier_of = (*o.homes).*kind.homes;
    if (open.*kind.placement != Placement::automatic) continue;
    for (Tier& tier : tier_of) homes.push_back(&tier);
  }
  const bool twice_open = open.update_twice.empty();
  const size_t twices = twice_open ? size_t{1} << layers : 1;
  Gap gap;
  Outcome best = found;
  double fastest = found.seconds;
  size_t all = 1;
  for (size_t i = 0; i < homes.size(); ++i) all *= tiers.size();
  for (size_t code = 0; code < all; ++code) {
    size_t rest = code;
    for (Tier* tier : homes) {
      *tier = tiers[rest % tiers.size()];
      rest /= tiers.size();
    }
    for (size_t bits = 0; bits < twices; ++bits) {
      bool useful = true;
      for (uint32_t l = 0; twice_open && l < layers; ++l) {
        o.update_twice[l] = (bits >> l & 1) != 0;
        useful &= !o.update_twice[l] ||
                  updates_twice(model, o, l, o.homes->weights[l], o.homes->optimizer[l]);
      }
      if (!useful) continue;
      const std::optional<Outcome> other = outcome(model, o, hardware);
      if (!other) continue;
      ++gap.placements;
      if (other->score < best.score) best = *other;
      fastest = std::min(fastest, other->seconds);
    }
  }
  gap.score = found.score / best.score - 1;
  gap.seconds = found.seconds / fastest - 1;
  return gap;
}

constexpr double kLargestGap = 0.005;
constexpr double kTraffic = kWriteWeight + 3 * kReadWeight;  // what sparing drives may cost

/// The largest gaps over all machines; every kind that the options leave open.
void expect_best(const ModelShape& model, const PlanOptions& options, std::span<const Tier> tiers,
                 const std::string& what) {
  for (const Machine& machine : machines()) {
    const Gap gap = gap_to_best(model, options, machine.hardware, tiers);
    EXPECT_GT(gap.placements, 50u) << machine.name << ", " << what;
    EXPECT_LE(gap.score, kLargestGap) << machine.name << ", " << what;
    EXPECT_LE(gap.seconds, kTraffic + kLargestGap) << machine.name << ", " << what;
  }
}

constexpr std::array kHostOrNvme = {Tier::host, Tier::nvme};

TEST(PlacementSearch, FindsTheBestOfAllHomesOfThreeKinds) {
  const ModelShape model = test::tiny_model(false, 1);
  for (const uint64_t host_kib : {600u, 800u, 1000u}) {
    PlanOptions o = tight(true, host_kib, 700);
    o.activations = Placement::host;
    o.update_twice.assign(model.layers.size(), false);
    expect_best(model, o, kHostOrNvme, fmt::format("unified, {} KiB", host_kib));
    o.unified = false;
    expect_best(model, o, kHostOrNvme, fmt::format("discrete, {} KiB", host_kib));
  }
}

TEST(PlacementSearch, FindsTheBestOfAllHomesWithActivations) {
  const ModelShape model = test::tiny_model(false, 1);
  PlanOptions o = tight(false, 800, 700);
  o.micro_batch_tokens = 128;
  o.update_twice.assign(model.layers.size(), false);
  expect_best(model, o, kHostOrNvme, "activations");
}

TEST(PlacementSearch, FindsTheBestLayersToUpdateTwice) {
  const ModelShape model = test::tiny_model(false, 2);
  for (const uint64_t host_kib : {600u, 900u}) {
    PlanOptions o = tight(false, host_kib, 700);
    o.activations = Placement::host;
    o.gradients = Placement::nvme;
    expect_best(model, o, kHostOrNvme, fmt::format("twice, {} KiB", host_kib));
  }
}

TEST(PlacementSearch, FindsTheBestOfAllTiers) {
  const ModelShape model = test::tiny_model(true, 1);
  for (const uint64_t device_kib : {800u, 1100u}) {
    PlanOptions o = tight(false, 600, device_kib);
    o.activations = Placement::host;
    o.gradients = Placement::host;
    o.update_twice.assign(model.layers.size(), false);
    expect_best(model, o, kTiers, fmt::format("{} KiB of device", device_kib));
  }
}

TEST(PlacementSearch, FindsTheBestWithoutStoredGradients) {
  const ModelShape model = test::tiny_model(false, 2);
  PlanOptions o = tight(true, 700, 700);
  o.update = UpdateTiming::in_backward;
  o.update_twice.assign(model.layers.size(), false);
  o.activations = Placement::host;
  expect_best(model, o, kHostOrNvme, "in the backward");
}

// ---- large models -----------------------------------------------------------------------------

/// Four GPUs of 96 GB, eight Gen5 drives. `mixed`: part of their rates when they read and write.
HardwareProfile four_gpus(double mixed) {
  HardwareProfile hw;
  hw.device.accelerator = true;
  hw.device.count = 4;
  hw.device.memory_bandwidth = 1.792e12;
  hw.device.peak_flops = 2.5e14;
  hw.device.reduce_gradient = 3.5e11;
  hw.device.export_gradient = 2.4e11;
  hw.link = {.h2d = 55e9, .d2h = 55e9, .both_h2d = 45e9, .both_d2h = 45e9};
  hw.host.memory_bandwidth = 9.8e11;
  hw.host.cores = 128;
  hw.drives = {.count = 8, .read = 48e9, .write = 26e9};
  hw.drives.mixed_read = mixed * 48e9;
  hw.drives.mixed_write = mixed * 26e9;
  hw.collective = {.all_gather = 4e10, .reduce_scatter = 4e10};
  return hw;
}

/// One of four ranks; `tokens` of all in a step. Large chunks and micro-batches keep tests short.
PlanOptions rank_options(const ModelShape& model, uint64_t tokens, uint64_t host_gib) {
  PlanOptions o;
  o.ranks = 4;
  o.unified = false;
  o.nvme_available = true;
  o.nvme_files = 8;
  o.sequence_len = 4096;
  o.micro_batches = 2;
  o.micro_batch_tokens = tokens / 4 / 2;
  o.compute_scratch_bytes = 4 * kGiB;
  o.device_memory = 85 * kGiB;
  o.host_memory = host_gib * kGiB;
  o.chunk_parameters = round_up(shard_parameters(model.layers[1], 4) / 2, kParameterAlignment);
  return o;
}

struct Large {
  const char* name;
  ModelShape model;
  PlanOptions options;
  HardwareProfile hardware;
};

std::vector<Large> large_cases() {
  const ModelShape m70 = test::large_model(80, 8192, 28672, 64);
  const ModelShape m405 = test::large_model(126, 16384, 53248, 128);
  return {{"70B, much memory", m70, rank_options(m70, 65536, 200), four_gpus(0.75)},
          {"70B, little memory", m70, rank_options(m70, 65536, 80), four_gpus(0.75)},
          {"405B", m405, rank_options(m405, 131072, 240), four_gpus(0.75)},
          {"405B, few tokens", m405, rank_options(m405, 32768, 500), four_gpus(1)}};
}

/// Homes with the first `counts[k]` layers of each kind on the host, the others on drives.
Homes prefix_homes(size_t layers, const std::array<size_t, 4>& counts) {
  Homes homes;
  for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
    std::vector<Tier>& tiers = homes.*kPlacedKinds[k].homes;
    tiers.assign(layers, Tier::nvme);
    std::fill_n(tiers.begin(), counts[k], Tier::host);
  }
  return homes;
}

TEST(PlacementSearch, IsWithinTwoPercentOnLargeModels) {
  for (const Large& c : large_cases()) {
    const PlacementChoice choice = solve_placement(c.model, c.options, c.hardware);
    const Outcome found = outcome(c.model, choice.options, c.hardware).value();
    const size_t layers = c.model.layers.size();
    size_t tried = 0;
    double best = found.score;
    const auto compare = [&](const Homes& homes, bool twice) {
      PlanOptions o = c.options;
      o.homes = homes;
      if (twice) o.update_twice.assign(layers, true);
      const std::optional<Outcome> other = outcome(c.model, o, c.hardware);
      if (!other) return;
      ++tried;
      best = std::min(best, other->score);
    };
    for (size_t code = 0; code < 256; ++code) {
      std::array<size_t, 4> counts{};
      for (size_t k = 0; k < 4; ++k) counts[k] = layers * (code >> 2 * k & 3) / 3;
      compare(prefix_homes(layers, counts), code % 3 != 0);
    }
    std::mt19937 random(7);
    for (size_t n = 0; n < 300; ++n) {
      Homes homes;
      for (const PlacedKind& kind : kPlacedKinds) {
        const std::array<double, 3> weights = {random() % 2 * 0.02, random() % 100 * 0.01, 1};
        std::discrete_distribution<size_t> tier(weights.begin(), weights.end());
        for (size_t l = 0; l < layers; ++l) (homes.*kind.homes).push_back(kTiers[tier(random)]);
      }
      compare(homes, n % 2 == 1);
    }
    EXPECT_GT(tried, 40u) << c.name;
    EXPECT_LE(found.score, 1.02 * best) << c.name;
    const Outcome greedy = outcome(c.model, c.options, c.hardware).value();
    EXPECT_LE(found.score, greedy.score * (1 + 1e-9)) << c.name;
  }
}

TEST(PlacementSearch, IsNeverSlowerThanWholeKindsByHand) {
  std::vector<Large> cases = large_cases();
  cases.resize(1);
  for (const Machine& machine : machines()) {
    const ModelShape model = test::tiny_model(true);
    PlanOptions o = tight(false, 1500, 1500);
    o.prefetch_depth.reset();
    cases.push_back({machine.name, model, o, machine.hardware});
  }
  for (const Large& c : cases) {
    const PlacementChoice choice = solve_placement(c.model, c.options, c.hardware);
    const Outcome found = outcome(c.model, choice.options, c.hardware).value();
    size_t tried = 0;
    for (size_t code = 0; code < 162; ++code) {
      PlanOptions o = c.options;
      o.update_twice.assign(c.model.layers.size(), code >= 81);
      size_t rest = code;
      for (const PlacedKind& kind : kPlacedKinds) {
        o.*kind.placement = kPlacements[rest % 3];
        rest /= 3;
      }
      const std::optional<Outcome> manual = outcome(c.model, o, c.hardware);
      if (!manual) continue;
      ++tried;
      EXPECT_LE(found.seconds, manual->seconds * (1 + kTraffic)) << c.name << " " << code;
      EXPECT_LE(found.score, manual->score * (1 + 1e-3)) << c.name << " " << code;
    }
    EXPECT_GT(tried, 0u) << c.name;
  }
}

TEST(PlacementSearch, UpdatesTwiceWhereTheForwardWaitsForDrives) {
  const ModelShape model = test::large_model(30, 16384, 53248, 128);  // a quarter of 405B
  const PlanOptions o = rank_options(model, 131072, 60);
  const PlacementChoice choice = solve_placement(model, o, four_gpus(1));
  EXPECT_GT(std::ranges::count(choice.options.update_twice, true), 16);
  EXPECT_GT(choice.greedy_seconds, 1.1 * choice.seconds);
  const Layout layout = plan_layout(model, choice.options);
  verify_program(plan_step(layout, steady_step(choice.options)), layout);
  // Where compute hides the forward's writes too, repeating updates would only read more.
  HardwareProfile slow = four_gpus(1);
  slow.device.peak_flops = 5e12;
  const PlacementChoice plain = solve_placement(model, o, slow);
  EXPECT_EQ(std::ranges::count(plain.options.update_twice, true), 0);
}

/// Compute hides all traffic: what differs is what drives have to bear.
TEST(PlacementSearch, WritesLessWhereTimesAreEqual) {
  const ModelShape model = test::tiny_model(false);
  HardwareProfile slow = even_profile();
  slow.device.peak_flops = 1e7;
  for (const uint64_t host_kib : {900u, 1500u, 2200u}) {
    PlanOptions o = tight(true, host_kib, 700);
    o.prefetch_depth.reset();
    const Outcome found = outcome(model, solve_placement(model, o, slow).options, slow).value();
    const Outcome greedy = outcome(model, o, slow).value();
    EXPECT_LE(found.seconds, 1.001 * greedy.seconds);
    EXPECT_LE(found.written, greedy.written);
    for (const Placement optimizer : {Placement::host, Placement::nvme}) {
      for (const Placement gradients : {Placement::host, Placement::nvme}) {
        PlanOptions manual = o;
        manual.optimizer = optimizer;
        manual.gradients = gradients;
        manual.update_twice.assign(model.layers.size(), false);
        const std::optional<Outcome> other = outcome(model, manual, slow);
        if (!other) continue;
        EXPECT_LE(found.written, other->written) << host_kib;
      }
    }
  }
}

TEST(PlacementSearch, KeepsWhatWasPlacedByHandAndRefusesWhatDoesNotFit) {
  const ModelShape model = test::tiny_model(false);
  PlanOptions o = tight(false, 1500, 900);
  o.weights = Placement::nvme;
  o.activations = Placement::host;
  o.update_twice.assign(model.layers.size(), true);
  const PlacementChoice choice = solve_placement(model, o, even_profile());
  EXPECT_EQ(std::ranges::count(choice.options.homes->weights, Tier::nvme), 5);
  EXPECT_EQ(std::ranges::count(choice.options.homes->activations, Tier::host), 5);
  EXPECT_EQ(choice.options.update_twice, o.update_twice);
  EXPECT_EQ(choice.options.prefetch_depth, 1u);
  o.host_memory = 64 * kKiB;
  EXPECT_THROW(solve_placement(model, o, even_profile()), Error);
  o = choice.options;
  EXPECT_FALSE(solve_placement(model, o, even_profile()).searched);
  o.homes->weights.assign(model.layers.size(), Tier::device);
  o.device_memory = 128 * kKiB;
  EXPECT_THROW(plan_layout(model, o), Error);
  o.nvme_available = false;
  EXPECT_THROW(plan_layout(model, o), Error);
}

}  // namespace
}  // namespace overspill
