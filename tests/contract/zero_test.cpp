// Several ranks give the results of one: every stage, placement, timing and state format, over real
// sockets; the bytes they exchange and the memory they need are those of ZeRO's formulas.
#include <cmath>
#include <cstring>

#include "engine/model/safetensors.h"
#include "tests/contract/devices.h"
#include "tests/contract/ranks_fixture.h"

namespace overspill {
namespace {

using namespace test;

/// Loss and norm of each step.
std::vector<std::pair<double, double>> curve(const FinishedRun& run) {
  std::vector<std::pair<double, double>> values;
  for (const Json& line : run.steps()) values.emplace_back(line["loss"], line["grad_norm"]);
  return values;
}

void expect_near_curves(const FinishedRun& one, const FinishedRun& other, double tolerance) {
  const auto a = curve(one), b = curve(other);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i].first, b[i].first, tolerance) << "loss of step " << i + 1;
    EXPECT_NEAR(a[i].second, b[i].second, tolerance * a[i].second) << "norm of step " << i + 1;
  }
}

/// The payloads of float32 models, value by value.
void expect_near_weights(const FinishedRun& one, const FinishedRun& other, double tolerance) {
  const std::string& a = one.checkpoint.at("model.safetensors");
  const std::string& b = other.checkpoint.at("model.safetensors");
  ASSERT_EQ(a.size(), b.size());
  uint64_t header = 0;
  std::memcpy(&header, a.data(), 8);
  for (size_t at = 8 + header; at < a.size(); at += 4) {
    float x = 0, y = 0;
    std::memcpy(&x, a.data() + at, 4);
    std::memcpy(&y, b.data() + at, 4);
    ASSERT_NEAR(x, y, tolerance);
  }
}

struct Stage {
  const char* name;
  uint32_t zero_stage;
  uint32_t hybrid_shard = 0;
};
constexpr Stage kStages[] = {
    {"stage0", 0}, {"stage1", 1}, {"stage2", 2}, {"stage3", 3}, {"hybrid", 3, 2}};

class ZeroStages : public RanksTest, public testing::WithParamInterface<Stage> {
 protected:
  TrainConfig config(uint32_t ranks, bool tied = false) const {
    TrainConfig made = ranked_config(ranks, tied);
    made.zero_stage = GetParam().zero_stage;
    made.hybrid_shard = GetParam().hybrid_shard;
    return made;
  }
  /// Groups of two need four ranks to have replicas.
  uint32_t ranks() const { return GetParam().hybrid_shard > 0 ? 4 : 2; }
};
INSTANTIATE_TEST_SUITE_P(All, ZeroStages, testing::ValuesIn(kStages),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ZeroStages, OneTwoAndFourRanksAgree) {
  for (const bool tied : {false, true}) {
    const FinishedRun one = run_fresh(ranked_config(1, tied));
    for (const uint32_t ranks : {2u, 4u}) {
      SCOPED_TRACE(fmt::format("{} ranks, tied {}", ranks, tied));
      const RankedRun several = run_ranked_fresh(config(ranks, tied), ranks);
      expect_near_curves(one, several.run, 1e-5);
      expect_near_weights(one, several.run, 1e-5);
    }
  }
}

TEST_P(ZeroStages, Bf16RanksAgree) {
  TrainConfig single = ranked_config(1);
  single.precision = Precision::bf16;
  const FinishedRun one = run_fresh(single);
  TrainConfig changed = config(4);
  changed.precision = Precision::bf16;
  // Gradients that are added in another order may round to another bf16 value.
  expect_near_curves(one, run_ranked_fresh(changed, 4).run, 1e-3);
  changed.reduce_dtype = ReduceType::bf16;
  expect_near_curves(one, run_ranked_fresh(changed, 4).run, 1e-2);
}

using Change = std::function<void(TrainConfig&)>;

TEST_P(ZeroStages, PlacementChangesNothing) {
  const std::vector<std::pair<const char*, Change>> variants = {
      {"device", [](TrainConfig& c) { place_all(c, Placement::device); }},
      {"host", [](TrainConfig& c) { place_all(c, Placement::host); }},
      {"weights on the device", [](TrainConfig& c) { c.offload.weights = Placement::device; }},
      {"optimizer in host memory", [](TrainConfig& c) { c.offload.optimizer = Placement::host; }},
      {"discrete", [](TrainConfig& c) { c.offload.device = discrete_device(); }},
      {"discrete, device",
       [](TrainConfig& c) {
         c.offload.device = discrete_device();
         place_all(c, Placement::device);
       }},
      {"discrete, host",
       [](TrainConfig& c) {
         c.offload.device = discrete_device();
         place_all(c, Placement::host);
       }},
      {"once", [](TrainConfig& c) { c.offload.update_twice = false; }},
      {"twice", [](TrainConfig& c) { c.offload.update_twice = true; }},
      {"depth 0", [](TrainConfig& c) { c.offload.prefetch_depth = 0; }},
      {"depth 3, chunks of 4096", [](TrainConfig& c) {
         c.offload.prefetch_depth = 3;
         c.offload.chunk_parameters = 4096;
       }}};
  for (const Precision precision : {Precision::float32, Precision::bf16}) {
    TrainConfig base = config(ranks(), true);
    base.precision = precision;
    base.reduce_dtype.reset();
    const RankedRun reference = run_ranked_fresh(base, ranks());
    for (const auto& [name, change] : variants) {
      SCOPED_TRACE(name);
      TrainConfig changed = base;
      change(changed);
      expect_same_results(reference.run, run_ranked_fresh(changed, ranks()).run);
    }
  }
}

TEST_P(ZeroStages, UpdatesInTheBackwardAreTheSame) {
  TrainConfig base = config(ranks());
  base.max_grad_norm = 0;
  const RankedRun reference = run_ranked_fresh(base, ranks());
  for (const Placement placement : {Placement::device, Placement::host, Placement::nvme}) {
    for (const DeviceMode device : devices_under_test()) {
      TrainConfig changed = base;
      place_all(changed, placement);
      changed.offload.device = device;
      update_in_backward(changed);
      expect_same_results(reference.run, run_ranked_fresh(changed, ranks()).run);
    }
  }
}

TEST_P(ZeroStages, FrozenLayersAndEightBitMoments) {
  TrainConfig single = ranked_config(1);
  single.unfrozen_parameters = {"model.layers.[02].mlp", "model.norm"};
  TrainConfig changed = config(4);
  changed.unfrozen_parameters = single.unfrozen_parameters;
  const FinishedRun frozen = run_fresh(single);
  const RankedRun by_four = run_ranked_fresh(changed, 4);
  expect_near_curves(frozen, by_four.run, 1e-5);
  expect_near_weights(frozen, by_four.run, 1e-5);
  for (const StateFormat state : {StateFormat::int8, StateFormat::bfloat16}) {
    single = ranked_config(1);
    single.optimizer_state = state;
    changed = config(ranks());
    changed.optimizer_state = state;
    expect_near_curves(run_fresh(single), run_ranked_fresh(changed, ranks()).run, 1e-4);
  }
}

TEST_P(ZeroStages, AdafactorAddsUpItsRowsAndColumns) {
  for (const UpdateTiming timing : {UpdateTiming::next_forward, UpdateTiming::in_backward}) {
    TrainConfig single = ranked_config(1);
    single.optimizer = OptimizerKind::adafactor;
    if (timing == UpdateTiming::in_backward) update_in_backward(single);
    TrainConfig changed = single;
    changed.gradient_accumulation_steps = 1;
    changed.zero_stage = GetParam().zero_stage;
    changed.hybrid_shard = GetParam().hybrid_shard;
    expect_near_curves(run_fresh(single), run_ranked_fresh(changed, 4).run, 1e-5);
  }
}

TEST_P(ZeroStages, EvaluationSeesTheSameSequences) {
  TrainConfig single = ranked_config(1);
  single.datasets.push_back(
      {.path = root_ / "val.bin", .type = TokenFormat::nanogpt, .evaluation = true});
  single.eval_sequences = 13;  // divides by no number of ranks
  single.eval_steps = 2;
  TrainConfig changed = config(4);
  changed.datasets = single.datasets;
  changed.eval_sequences = single.eval_sequences;
  changed.eval_steps = single.eval_steps;
  const RankedRun several = run_ranked_fresh(changed, 4);
  const FinishedRun one = run_fresh(single);
  EXPECT_NEAR(several.run.report.first_eval_loss, one.report.first_eval_loss, 1e-5);
  EXPECT_NEAR(several.run.report.last_eval_loss, one.report.last_eval_loss, 1e-5);
}

/// Sharing changes who adds and who keeps, not what: one world size, the same bits.
TEST_F(RanksTest, StagesGiveTheSameBits) {
  for (const uint32_t ranks : {2u, 4u}) {
    TrainConfig config = ranked_config(ranks);
    config.max_grad_norm = 0;  // the norm's own rounding depends on the parts it is made of
    config.deterministic_reduction = true;
    const RankedRun reference = run_ranked_fresh(config, ranks);
    for (const uint32_t stage : {0u, 1u, 2u}) {
      config.zero_stage = stage;
      const RankedRun other = run_ranked_fresh(config, ranks);
      expect_near_curves(reference.run, other.run, 1e-14);
      expect_same_files(reference.run.checkpoint, other.run.checkpoint);
    }
  }
}

/// Resumed with another number of ranks, another stage and other tiers.
TEST_F(RanksTest, StopsAtFourRanksAndResumesAtFewer) {
  TrainConfig config = ranked_config(4);
  config.max_steps = 6;
  const RankedRun whole = run_ranked_fresh(config, 4);
  config.max_steps = 3;
  config.output_dir = root_ / "first";
  run_ranked(config, 4);
  const auto resume = [&](uint32_t ranks, uint32_t stage, Placement placement) {
    TrainConfig next = ranked_config(ranks);
    next.max_steps = 6;
    next.zero_stage = stage;
    place_all(next, placement);
    next.resume_from_checkpoint = root_ / "first" / "latest";
    return run_ranked_fresh(next, ranks);
  };
  const auto expect_continued = [&](const RankedRun& resumed, double tolerance) {
    const auto all = curve(whole.run), rest = curve(resumed.run);
    ASSERT_EQ(rest.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(rest[i].first, all[3 + i].first, tolerance);
      EXPECT_NEAR(rest[i].second, all[3 + i].second, tolerance * all[3 + i].second);
    }
  };
  const RankedRun same = resume(4, 3, Placement::host);
  expect_continued(same, 0);
  expect_same_files(same.run.checkpoint, whole.run.checkpoint);
  expect_continued(resume(2, 3, Placement::nvme), 1e-5);
  expect_continued(resume(2, 2, Placement::device), 1e-5);
  expect_continued(resume(1, 0, Placement::nvme), 1e-5);
}

/// Parameters of a rank's part of all layers, and of the blocks.
struct Parts {
  uint64_t all = 0, blocks = 0;
};

Parts parts_of(const Layout& layout) {
  Parts parts;
  for (uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    parts.all += layout.shard(l);
    if (l > 0 && l < layout.model.head()) parts.blocks += layout.shard(l);
  }
  return parts;
}

/// Bytes that each rank sends a step, by ZeRO's formulas, whatever the accumulation. Weights and
/// sums have 4 bytes here, or 2.
TEST_P(ZeroStages, CollectiveBytesAreTheClosedFormulas) {
  constexpr uint64_t kRanks = 4;
  const uint32_t stage = GetParam().zero_stage;
  const uint64_t group = stage == 0                    ? 1
                         : GetParam().hybrid_shard > 0 ? GetParam().hybrid_shard
                                                       : kRanks;
  const uint64_t copies = kRanks / group;
  for (const uint32_t accumulation : {1u, 8u}) {
    for (const uint64_t width : {4, 2}) {
      SCOPED_TRACE(fmt::format("accumulation {}, {} bytes", accumulation, width));
      TrainConfig made = config(kRanks);
      made.gradient_accumulation_steps = accumulation;
      made.offload.prefetch_depth = 0;
      made.precision = width == 4 ? Precision::float32 : Precision::bf16;
      made.reduce_dtype.reset();
      const RankedRun run = run_ranked_fresh(made, kRanks);
      const Parts parts = parts_of(run.ranks[0].layout);
      const uint64_t reduce_scatter = (group - 1) * parts.all * width;
      const uint64_t all_reduce = 2 * (copies - 1) * parts.all / copies * width;
      const uint64_t passes = stage == 3 ? parts.all + parts.blocks : parts.all;
      const uint64_t all_gather = (group - 1) * passes * width;
      const std::vector<Json> steps = run.run.steps();
      for (size_t i = 0; i < steps.size(); ++i) {
        const bool gathers = stage == 3 || i > 0;  // the first step has no update to share
        EXPECT_EQ(steps[i]["lane_bytes"]["collective"],
                  reduce_scatter + all_reduce + (gathers ? all_gather : 0));
      }
      for (const RankResult& rank : run.ranks) {
        EXPECT_EQ(rank.bytes_sent, rank.report.lane_bytes[static_cast<size_t>(Lane::collective)])
            << "what was planned is what was sent";
      }
    }
  }
}

TEST_F(RanksTest, AHardwareProfilePredictsOnEveryRank) {
  TrainConfig config = ranked_config(2);
  const RankedRun plain = run_ranked_fresh(config, 2);
  config.offload.hardware_profile = HardwareProfile();
  const RankedRun predicted = run_ranked_fresh(config, 2);
  EXPECT_EQ(step_text(plain.run.lines), step_text(predicted.run.lines));
  EXPECT_TRUE(predicted.run.steps()[0].contains("predicted"));
}

/// Bytes of host memory that hold each kind of state on a rank, as the arenas count them: a part is
/// 1/N of each layer, padded to 4096 parameters.
TEST_F(RanksTest, MemoryFallsWithTheRanksAsTheStageSays) {
  for (const uint32_t stage : {0u, 1u, 2u, 3u}) {
    for (const uint32_t ranks : {1u, 2u, 4u}) {
      SCOPED_TRACE(fmt::format("stage {}, {} ranks", stage, ranks));
      TrainConfig config = ranked_config(ranks);
      config.zero_stage = stage;
      place_all(config, Placement::host);
      const std::vector<RankResult> results = run_ranked_fresh(config, ranks).ranks;
      uint64_t part = 0, copies = 0;  // parameters
      for (const LayerShape& layer : results[0].layout.model.layers) {
        const uint64_t share = round_up(ceil_div(layer.padded, stage > 0 ? ranks : 1), 4096);
        part += share;
        copies += stage > 0 ? share * ranks : share;
      }
      for (const RankResult& result : results) {
        const Layout& layout = result.layout;
        const auto held = [&](PageKind kind) { return layout.home_bytes(kind, Tier::host); };
        EXPECT_EQ(held(PageKind::weight), 4 * (stage == 3 ? part : copies));
        // The last ranks' parts may be padding alone, which has no state.
        EXPECT_LE(held(PageKind::optimizer), 8 * part);
        EXPECT_LE(held(PageKind::gradient), 4 * part);
        if (layout.options.rank > 0) continue;
        EXPECT_EQ(held(PageKind::optimizer), 8 * part);
        EXPECT_EQ(held(PageKind::gradient), 4 * part);
        EXPECT_GE(layout.host_bytes, held(PageKind::weight) + 12 * part) << "all of it is counted";
      }
    }
  }
}

}  // namespace
}  // namespace overspill
