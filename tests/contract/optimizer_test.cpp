// Every update rule and state format: the same bits for every placement, chunk, timing and resume,
// and the bytes that the format promises.
#include <gtest/gtest.h>

#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

struct Rule {
  const char* name;
  OptimizerKind kind;
  StateFormat state;
  Precision precision;
  uint64_t bytes;  ///< of a parameter's remainder and moments, without scales
};
void PrintTo(const Rule& rule, std::ostream* out) { *out << rule.name; }

class OptimizerContract : public TrainingTest, public testing::WithParamInterface<Rule> {
 protected:
  TrainConfig config() const {
    TrainConfig made = tiny_config();
    made.optimizer = GetParam().kind;
    made.optimizer_state = GetParam().state;
    made.precision = GetParam().precision;
    made.learning_rate = made.optimizer == OptimizerKind::adamw ? 1e-2 : 1e-3;
    made.max_steps = 4;
    return made;
  }
};

constexpr auto kBf16 = Precision::bf16, kFloat32 = Precision::float32;
INSTANTIATE_TEST_SUITE_P(
    Rules, OptimizerContract,
    testing::Values(
        Rule{"adamw_bfloat16", OptimizerKind::adamw, StateFormat::bfloat16, kBf16, 2 + 4},
        Rule{"adamw_int8", OptimizerKind::adamw, StateFormat::int8, kBf16, 2 + 2},
        Rule{"adamw_int8_of_float32", OptimizerKind::adamw, StateFormat::int8, kFloat32, 2},
        Rule{"lion_float32", OptimizerKind::lion, StateFormat::float32, kBf16, 2 + 4},
        Rule{"lion_int8", OptimizerKind::lion, StateFormat::int8, kBf16, 2 + 1},
        Rule{"sgd_bfloat16", OptimizerKind::sgd, StateFormat::bfloat16, kBf16, 2 + 2},
        Rule{"sgd_of_float32", OptimizerKind::sgd, StateFormat::float32, kFloat32, 4},
        Rule{"adafactor", OptimizerKind::adafactor, StateFormat::float32, kBf16, 2},
        Rule{"adafactor_of_float32", OptimizerKind::adafactor, StateFormat::float32, kFloat32, 0}),
    [](const testing::TestParamInfo<Rule>& info) { return std::string(info.param.name); });

TEST_P(OptimizerContract, PlacementChangesNoBit) {
  const FinishedRun reference = run_fresh(config());
  TrainConfig wide = config();
  wide.optimizer_state = StateFormat::float32;
  EXPECT_NEAR(reference.report.last_loss, run_fresh(wide).report.last_loss, 0.01);
  const std::vector<std::pair<const char*, std::function<void(TrainConfig&)>>> variants = {
      {"all in host memory", [](TrainConfig& c) { place_all(c, Placement::host); }},
      {"discrete, on NVMe, small chunks",
       [](TrainConfig& c) {
         c.offload.device = discrete_device();
         c.offload.chunk_parameters = 4096;
       }},
      {"discrete, updates on the device",
       [](TrainConfig& c) {
         c.offload.device = discrete_device();
         place_all(c, Placement::device);
       }},
      {"one chunk a layer, depth 3", [](TrainConfig& c) {
         c.offload.chunk_parameters = 1 << 20;
         c.offload.prefetch_depth = 3;
       }}};
  for (const auto& [name, change] : variants) {
    SCOPED_TRACE(name);
    TrainConfig changed = config();
    change(changed);
    expect_same_results(reference, run_fresh(changed));
  }
}

TEST_P(OptimizerContract, UpdateTimingChangesNoBit) {
  TrainConfig unclipped = config();
  unclipped.max_grad_norm = 0;
  TrainConfig in_backward = config();
  update_in_backward(in_backward);
  expect_same_results(run_fresh(unclipped), run_fresh(in_backward));
}

TEST_P(OptimizerContract, ResumesBitForBitElsewhere) {
  const FinishedRun whole = run_fresh(config());
  TrainConfig saving = config();
  saving.output_dir = root_ / "saves";
  saving.save_steps = 1;
  run(saving);
  for (const char* checkpoint : {"checkpoint-1", "checkpoint-3"}) {
    SCOPED_TRACE(checkpoint);
    TrainConfig resumed = config();
    resumed.resume_from_checkpoint = saving.output_dir / checkpoint;
    resumed.offload.chunk_parameters = 4096;
    place_all(resumed, Placement::host);
    const FinishedRun rest = run_fresh(resumed);
    expect_same_files(whole.checkpoint, rest.checkpoint);
  }
}

TEST_P(OptimizerContract, StateTakesTheFormatsBytes) {
  const Layout layout = RunSetup(config()).layout;
  uint64_t parameters = 0, scales = 0;
  for (const Chunk& chunk : layout.table.chunks) {
    parameters += chunk.parameters;
    // Two scales a block, eight bytes an exact parameter, and the end of a 4096-byte sector.
    if (GetParam().state == StateFormat::int8) {
      scales += chunk.parameters / kStateBlock * 8 + chunk.exact * 8;
    }
    scales += 4096;
  }
  const uint64_t bytes = layout.home_bytes(PageKind::optimizer, Tier::nvme);
  EXPECT_GE(bytes, parameters * GetParam().bytes);
  EXPECT_LE(bytes, parameters * GetParam().bytes + scales);
}

TEST_P(OptimizerContract, AnotherFormatDoesNotResume) {
  TrainConfig saving = config();
  saving.output_dir = root_ / "saves";
  saving.max_steps = 1;
  saving.save_steps = 1;
  run(saving);
  TrainConfig other = config();
  other.resume_from_checkpoint = saving.output_dir / "checkpoint-1";
  // A kind and a format that share no array name and type with any of the rules.
  other.optimizer =
      other.optimizer == OptimizerKind::sgd ? OptimizerKind::adamw : OptimizerKind::sgd;
  const Error error = refusal(other);
  EXPECT_EQ(error.code(), ErrorCode::invalid_file);
  EXPECT_NE(std::string(error.what()).find("optimizer_state"), std::string::npos) << error.what();
}

class StatelessSgd : public TrainingTest {};

TEST_F(StatelessSgd, KeepsNoOptimizerPagesWithFloat32Masters) {
  TrainConfig config = tiny_config();
  config.optimizer = OptimizerKind::sgd;
  config.sgd_momentum = 0;
  config.precision = Precision::float32;
  EXPECT_EQ(RunSetup(config).layout.home_bytes(PageKind::optimizer, Tier::nvme), 0u);
  const FinishedRun reference = run_fresh(config);
  EXPECT_NE(reference.report.last_loss, reference.report.first_loss);
  place_all(config, Placement::host);
  expect_same_results(reference, run_fresh(config));
}

}  // namespace
}  // namespace overspill
