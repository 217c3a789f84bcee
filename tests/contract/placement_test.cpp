// Results never depend on placement: losses, norms, exported weights and optimizer state are the
// same bits for every tier, depth, chunk, block, backend, number of drives, mode and timing.
#include <gtest/gtest.h>

#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"
#include "tests/unit/engine/base/parallel_groups.h"
#include "tests/unit/engine/train/prepared_file.h"

namespace overspill {
namespace {

using namespace test;

using Change = std::function<void(TrainConfig&)>;
using Variants = std::vector<std::pair<std::string, Change>>;

struct Mode {
  Precision precision;
  DeviceMode device;
};

class PlacementContract : public TrainingTest, public testing::WithParamInterface<Mode> {
 protected:
  TrainConfig base(bool tied = false) const {
    TrainConfig config = tiny_config(tied);
    config.precision = GetParam().precision;
    config.offload.device = GetParam().device;
    return config;
  }
  void expect_invariant(const TrainConfig& config, const Variants& variants) {
    const FinishedRun reference = run_fresh(config);
    EXPECT_EQ(reference.steps().size(), 3u);
    EXPECT_TRUE(reference.checkpoint.contains("optimizer.safetensors"));
    for (const auto& [name, change] : variants) {
      SCOPED_TRACE(name);
      TrainConfig changed = config;
      change(changed);
      expect_same_results(reference, run_fresh(changed));
    }
  }
};

std::vector<Mode> modes() {
  std::vector<Mode> all;
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    for (const DeviceMode device : devices_under_test()) all.push_back({precision, device});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Modes, PlacementContract, testing::ValuesIn(modes()),
                         [](const testing::TestParamInfo<Mode>& info) {
                           return fmt::format("{}_{}", precision_name(info.param.precision),
                                              device_name(info.param.device));
                         });

/// One kind of state varied at a time, and everything in one tier.
Variants tier_variants(bool gradients) {
  const std::vector<std::pair<const char*, Placement OffloadConfig::*>> kinds = {
      {"weights", &OffloadConfig::weights},
      {"optimizer", &OffloadConfig::optimizer},
      {"gradients", &OffloadConfig::gradients},
      {"activations", &OffloadConfig::activations}};
  const std::vector<std::pair<const char*, Placement>> tiers = {
      {"device", Placement::device}, {"host", Placement::host}, {"nvme", Placement::nvme}};
  Variants variants;
  for (const auto& [tier_name, tier] : tiers) {
    const Placement placement = tier;
    if (tier != Placement::nvme) {
      for (const auto& [kind_name, kind] : kinds) {
        if (!gradients && kind == &OffloadConfig::gradients) continue;
        const auto member = kind;
        variants.emplace_back(std::string(kind_name) + " in " + tier_name,
                              [=](TrainConfig& c) { c.offload.*member = placement; });
      }
    }
    variants.emplace_back(std::string("all in ") + tier_name, [=](TrainConfig& c) {
      for (const auto& [name, kind] : kinds) {
        if (gradients || kind != &OffloadConfig::gradients) c.offload.*kind = placement;
      }
    });
  }
  return variants;
}

TEST_P(PlacementContract, Tiers) { expect_invariant(base(), tier_variants(true)); }

TEST_P(PlacementContract, TiersTied) { expect_invariant(base(true), tier_variants(true)); }

TEST_P(PlacementContract, TiersWithUpdatesInTheBackward) {
  TrainConfig config = base(true);
  update_in_backward(config);
  expect_invariant(config, tier_variants(false));
}

TEST_P(PlacementContract, AutomaticWithinSmallBudgets) {
  Variants variants;
  for (const uint64_t kib : {256u, 512u, 768u}) {
    variants.emplace_back(std::to_string(kib) + " KiB", [=](TrainConfig& c) {
      place_all(c, Placement::automatic);
      c.offload.chunk_parameters = 4096;
      // Little beside what the kernels need.
      const uint64_t scratch = RunSetup(c).layout.options.compute_scratch_bytes;
      c.offload.device_memory = scratch + (kib / 2 + (gpu_under_test() ? 256 : 370)) * kKiB;
      c.offload.host_memory = kib * kKiB;
      const Layout layout = RunSetup(c).layout;

      EXPECT_GT(layout.nvme_bytes, 0u);
    });
  }
  expect_invariant(base(), variants);
}

TEST_P(PlacementContract, DepthChunkAndBlock) {
  Variants variants;
  for (uint32_t depth = 0; depth <= 4; ++depth) {
    variants.emplace_back("prefetch_depth " + std::to_string(depth),
                          [=](TrainConfig& c) { c.offload.prefetch_depth = depth; });
  }
  for (const uint64_t chunk : {4096u, 12288u, 1u << 20}) {
    variants.emplace_back("chunk_parameters " + std::to_string(chunk),
                          [=](TrainConfig& c) { c.offload.chunk_parameters = chunk; });
  }
  for (const uint64_t block : {4096u, 65536u}) {
    variants.emplace_back("block_size " + std::to_string(block),
                          [=](TrainConfig& c) { c.offload.io.block_size = block; });
  }
  expect_invariant(base(), variants);
}

TEST_P(PlacementContract, DrivesAndBackends) {
  const auto drives = [this](TrainConfig& c) {
    c.offload.nvme_paths = {root_ / "nvme0", root_ / "nvme1", root_ / "nvme2"};
    c.offload.io.block_size = 8192;
  };
  Variants variants = {
      {"3 drives", drives},
      {"threads", [](TrainConfig& c) { c.offload.io.backend = IoBackend::threads; }},
      {"libaio", [](TrainConfig& c) { c.offload.io.backend = IoBackend::libaio; }},
      {"no checksums", [](TrainConfig& c) { c.offload.io.verify = false; }},
      {"3 drives of different speed",
       [=](TrainConfig& c) {
         drives(c);
         c.offload.nvme_shares = {5, 1, 3};
       }},
      {"one write beside reads", [](TrainConfig& c) { c.offload.io.write_depth = 1; }},
      {"threads, 3 drives, one request at a time", [=](TrainConfig& c) {
         drives(c);
         c.offload.io.backend = IoBackend::threads;
         c.offload.io.queue_depth = 1;
       }}};
  if (describe_io_backend() == "io_uring") {
    variants.emplace_back("io_uring",
                          [](TrainConfig& c) { c.offload.io.backend = IoBackend::io_uring; });
  }
  expect_invariant(base(), variants);
  if (describe_io_backend() != "io_uring") GTEST_SKIP() << "io_uring: " << describe_io_backend();
}

TEST_P(PlacementContract, UpdateTimingWithoutClipping) {
  for (const bool tied : {false, true}) {
    TrainConfig config = base(tied);
    config.max_grad_norm = 0;
    expect_invariant(config, {{"in_backward", update_in_backward},
                              {"in_backward, depth 0, small chunks",
                               [](TrainConfig& c) {
                                 update_in_backward(c);
                                 c.offload.prefetch_depth = 0;
                                 c.offload.chunk_parameters = 4096;
                               }},
                              {"in_backward, all on the device", [](TrainConfig& c) {
                                 place_all(c, Placement::device);
                                 update_in_backward(c);
                               }}});
  }
}

TEST_P(PlacementContract, UpdatedTwice) {
  const auto twice = [](const Change& change) {
    return [=](TrainConfig& c) {
      c.offload.update_twice = true;
      change(c);
    };
  };
  Variants variants;
  for (uint32_t depth = 0; depth <= 4; ++depth) {
    variants.emplace_back("prefetch_depth " + std::to_string(depth),
                          twice([=](TrainConfig& c) { c.offload.prefetch_depth = depth; }));
  }
  for (const Placement tier : {Placement::device, Placement::host}) {
    variants.emplace_back("gradients in memory",
                          twice([=](TrainConfig& c) { c.offload.gradients = tier; }));
    variants.emplace_back("weights in memory",  // updated once
                          twice([=](TrainConfig& c) { c.offload.weights = tier; }));
  }
  variants.emplace_back("small chunks, saves between steps", twice([](TrainConfig& c) {
                          c.offload.chunk_parameters = 4096;
                          c.save_steps = 1;
                        }));
  variants.emplace_back("automatic", twice([](TrainConfig& c) {
                          place_all(c, Placement::automatic);
                          c.offload.device_memory = 2816 * kKiB;
                          c.offload.host_memory = 512 * kKiB;
                        }));
  for (const bool tied : {false, true}) {
    TrainConfig config = base(tied);
    config.gradient_accumulation_steps = 3;
    config.max_steps = 3;
    expect_invariant(config, variants);
  }
}

/// Micro-batches' activations pass through slots that hold fewer of them than there are.
TEST_P(PlacementContract, ActivationsThroughTightSlots) {
  for (const uint32_t micro_batches : {1u, 4u}) {
    TrainConfig config = base();
    config.gradient_accumulation_steps = micro_batches;
    const Change tight = [](TrainConfig& c) {
      c.offload.prefetch_depth = 0;
      c.offload.chunk_parameters = 4096;
      c.offload.device_memory = 4096;  // refused: says how much is needed at least
      try {
        const RunSetup setup(c);
      } catch (const Error& error) {
        const std::string text = error.what();
        const size_t at = text.find("set offload.device_memory: ") + 27;
        c.offload.device_memory = parse_bytes(text.substr(at, text.find("MiB", at) + 3 - at));
      }
      // The advice is in whole MiB; find the least budget that is accepted.
      for (uint64_t step = 512 * kKiB; step >= 4096; step /= 2) {
        TrainConfig less = c;
        *less.offload.device_memory -= step;
        try {
          const RunSetup setup(less);
          c.offload.device_memory = less.offload.device_memory;
        } catch (const Error&) {
        }
      }
      const RunSetup setup(c);
      EXPECT_EQ(setup.layout.activation_slots.size(), 2u) << "not the tight layout";
    };
    expect_invariant(config, {{"tight", tight}, {"all on the device", [](TrainConfig& c) {
                                                   place_all(c, Placement::device);
                                                 }}});
  }
}

/// Evaluations and saves between steps apply the pending update early: the same bits.
TEST_P(PlacementContract, EvaluationAndSavesBetweenSteps) {
  const Change evaluate = [this](TrainConfig& c) {
    c.datasets.push_back({.path = root_ / "val.bin", .type = TokenFormat::nanogpt});
    c.datasets.back().evaluation = true;
    c.eval_steps = 1;
    c.eval_sequences = 5;  // an odd rest after full micro-batches
  };
  const Change save = [](TrainConfig& c) { c.save_steps = 1; };
  expect_invariant(
      base(true),
      {{"eval_steps 1", evaluate}, {"save_steps 1", save}, {"both", [=](TrainConfig& c) {
                                                              evaluate(c);
                                                              save(c);
                                                            }}});
}

/// Documents packed into sequences, a third of whose tokens are not trained on.
TEST_P(PlacementContract, MasksAndDocuments) {
  PreparedFile file{.tokens = {}, .starts = {}, .sequence_len = 32, .vocab_size = kVocabulary};
  for (size_t t = 0; t < 32 * 40; ++t) {
    file.tokens.push_back(static_cast<uint32_t>(random_below(5, t, kVocabulary)));
    const bool starts = t % 32 == 0 || random_below(6, t, 9) == 0;
    if (starts) file.starts.push_back(t);
    file.trained.push_back(!starts && random_below(7, t, 3) > 0);
  }
  put_file(root_ / "packed.tokens", file.bytes());
  TrainConfig config = base(true);
  config.datasets = {{.path = root_ / "packed.tokens"}};
  Variants variants = tier_variants(true);
  variants.emplace_back("small chunks, fetched earlier", [](TrainConfig& c) {
    c.offload.chunk_parameters = 4096;
    c.offload.prefetch_depth = 2;
  });
  expect_invariant(config, variants);
}

class PlacementOfModes : public TrainingTest {};

TEST_F(PlacementOfModes, UnifiedEqualsDiscrete) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    TrainConfig config = tiny_config(true);
    config.precision = precision;
    const FinishedRun unified = run_fresh(config);
    config.offload.device = discrete_device();
    expect_same_results(unified, run_fresh(config));
    place_all(config, Placement::host);
    expect_same_results(unified, run_fresh(config));
  }
}

/// The repeated update draws the same random bits and the same averages.
TEST_F(PlacementOfModes, UpdatedTwiceWithEveryOptimizer) {
  for (const OptimizerKind kind :
       {OptimizerKind::adamw, OptimizerKind::lion, OptimizerKind::sgd, OptimizerKind::adafactor}) {
    for (const StateFormat state :
         {StateFormat::float32, StateFormat::bfloat16, StateFormat::int8}) {
      if (kind == OptimizerKind::adafactor && state != StateFormat::float32) continue;
      TrainConfig config = tiny_config();
      config.optimizer = kind;
      config.optimizer_state = state;
      config.learning_rate = 1e-3;
      const FinishedRun reference = run_fresh(config);
      config.offload.update_twice = true;
      for (const DeviceMode device : devices_under_test()) {
        config.offload.device = device;
        expect_same_results(reference, run_fresh(config));
      }
    }
  }
}

TEST_F(PlacementOfModes, ResultsDoDependOnWhatTheyShould) {
  const FinishedRun run_a = run_fresh(tiny_config());
  TrainConfig config = tiny_config();
  config.seed = 43;
  EXPECT_NE(step_text(run_a.lines), step_text(run_fresh(config).lines));
  config = tiny_config();
  config.precision = Precision::float32;
  EXPECT_NE(step_text(run_a.lines), step_text(run_fresh(config).lines));
  config = tiny_config();
  config.max_grad_norm = 0;
  EXPECT_FALSE(run_a.checkpoint.at("model.safetensors") ==
               run_fresh(config).checkpoint.at("model.safetensors"))
      << "the norm is not clipped, so the tests above compare runs without clipping";
}

TEST_F(PlacementOfModes, NumberOfThreads) {
  cpu_set_t allowed = Child::allowed_cpus(CPU_SETSIZE);
  if (CPU_COUNT(&allowed) < 2) GTEST_SKIP() << "this process may use only one CPU";
  write_yaml();
  std::vector<Files> checkpoints;
  std::vector<std::string> steps;
  for (const size_t cpus : {1u, 2u}) {
    const std::string out = "out-" + std::to_string(cpus);
    const Child::Result result =
        start({"output_dir=" + (root_ / out).string()}, {.cpus = cpus}).wait();
    ASSERT_EQ(result.exit_code, 0) << result.err;
    checkpoints.push_back(files_in(root_ / out / "checkpoint-3"));
    steps.push_back(step_text(metrics_of(root_ / out)));
  }
  EXPECT_TRUE(checkpoints[0].contains("optimizer.safetensors"));
  EXPECT_EQ(steps[0], steps[1]);
  expect_same_files(checkpoints[0], checkpoints[1]);
}

TEST_F(PlacementOfModes, GroupsOfThreads) {
  const std::vector<uint32_t> cpus = cpus_of_thread();
  if (cpus.size() < 2) GTEST_SKIP() << "this process may use only one CPU";
  for (const Placement placement : {Placement::nvme, Placement::host}) {
    for (const DeviceMode device : devices_under_test()) {
      TrainConfig config = tiny_config(true);
      config.offload.device = device;
      place_all(config, placement);
      const FinishedRun reference = run_fresh(config);
      const GroupsOfTest two({{.cpus = {cpus[0]}}, {.cpus = {cpus[1]}}});
      expect_same_results(reference, run_fresh(config));
    }
  }
}

}  // namespace
}  // namespace overspill
