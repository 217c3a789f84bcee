// Adafactor's factored second moments in whole runs: where they live, what of them a checkpoint
// holds, and that frozen tensors have none. tests/contract/optimizer_test.cpp holds its promises of
// equal bits.
#include <gtest/gtest.h>

#include "engine/model/safetensors.h"
#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

class AdafactorContract : public TrainingTest {
 protected:
  TrainConfig adafactor_config(bool tied = false) const {
    TrainConfig config = tiny_config(tied);
    config.optimizer = OptimizerKind::adafactor;
    config.learning_rate = 1e-3;
    return config;
  }
};

TEST_F(AdafactorContract, ConfigurationIsReadAndOtherStatesAreRefused) {
  const fs::path yaml = write_yaml("optimizer: adafactor\nadafactor_decay: 0.7\n");
  const TrainConfig config = load_train_config(yaml, {});
  EXPECT_EQ(config.optimizer, OptimizerKind::adafactor);
  EXPECT_EQ(optimizer_settings(config).adafactor_decay, 0.7);
  EXPECT_EQ(load_train_config(yaml, {"adafactor_decay=null"}).adafactor_decay, 0.8);
  const auto refused = [&](const std::string& set) {
    try {
      load_train_config(yaml, {set});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_TRUE(
      has(refused("optimizer_state=int8"), "optimizer_state: found \"int8\", but adafactor"));
  EXPECT_TRUE(has(refused("adafactor_decay=0"), "above 0 and below 1"));
  EXPECT_TRUE(has(refused("adafactor_decay=1"), "above 0 and below 1"));
}

TEST_F(AdafactorContract, FactorsAreOneSlotInTheHostBudget) {
  const Layout layout = RunSetup(adafactor_config()).layout;
  uint64_t elements = 0;
  for (const LayerShape& layer : layout.model.layers) {
    for (const LayerTensor& t : layer.tensors) {
      if (t.shape.size() == 2) elements += (t.shape[0] + t.shape[1] + 16) / 16 * 16;
    }
  }
  const Slot& slot = layout.slot(layout.factored);
  EXPECT_STREQ(slot.role, "factored_moments");
  EXPECT_EQ(slot.memory, Tier::host);
  EXPECT_EQ(slot.bytes, ceil_div(elements * 12, 4096) * 4096);
  EXPECT_LE(slot.offset + slot.bytes, layout.host_bytes);
  EXPECT_EQ(RunSetup(tiny_config()).layout.factored, SlotId{});
}

TEST_F(AdafactorContract, CheckpointHoldsRowsAndColumns) {
  for (const bool tied : {false, true}) {
    TrainConfig config = adafactor_config(tied);
    config.unfrozen_parameters = {"model.embed_tokens", "model.layers.0", "model.norm"};
    config.output_dir = root_ / (tied ? "tied-out" : "untied-out");
    const fs::path checkpoint = run(config).report.checkpoint;
    const SafetensorsFile state(checkpoint / "optimizer.safetensors");
    for (const LayerShape& layer : RunSetup(config).model.layers) {
      for (const LayerTensor& t : layer.tensors) {
        SCOPED_TRACE(t.name);
        const bool matrix = t.shape.size() == 2;
        EXPECT_EQ(state.find(t.name + ".remainder") != nullptr, t.trainable);
        EXPECT_EQ(state.find(t.name + ".exp_avg_sq") != nullptr, t.trainable && !matrix);
        EXPECT_EQ(state.find(t.name + ".exp_avg"), nullptr);
        const auto* row = state.find(t.name + ".exp_avg_sq_row");
        const auto* column = state.find(t.name + ".exp_avg_sq_col");
        ASSERT_EQ(row != nullptr, t.trainable && matrix);
        ASSERT_EQ(column != nullptr, t.trainable && matrix);
        if (row == nullptr) continue;
        EXPECT_EQ(row->spec.shape, std::vector<uint64_t>{t.shape[0]});
        EXPECT_EQ(column->spec.shape, std::vector<uint64_t>{t.shape[1]});
        std::vector<float> rows(t.shape[0]), columns(t.shape[1]);
        state.read_floats(*row, 0, rows);
        state.read_floats(*column, 0, columns);
        double row_mean = 0, column_mean = 0;  // both are the mean over all elements
        for (const float value : rows) row_mean += value / static_cast<double>(rows.size());
        for (const float value : columns) {
          column_mean += value / static_cast<double>(columns.size());
        }
        EXPECT_GT(row_mean, 0);
        EXPECT_NEAR(row_mean, column_mean, 1e-6 * row_mean);
      }
    }
  }
}

TEST_F(AdafactorContract, FrozenAndTiedResumeBitForBit) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    TrainConfig config = adafactor_config(true);
    config.precision = precision;
    config.unfrozen_parameters = {"model.embed_tokens", "model.layers.1", "model.norm"};
    const FinishedRun whole = run_fresh(config);
    config.save_steps = 1;
    config.output_dir = root_ / precision_name(precision);
    run(config);
    TrainConfig resumed = config;
    resumed.resume_from_checkpoint = config.output_dir / "checkpoint-1";
    resumed.offload.device = discrete_device();
    resumed.offload.chunk_parameters = 4096;
    expect_same_files(whole.checkpoint, run_fresh(resumed).checkpoint);

    for (const char* other : {"model.embed_tokens", "model.layers"}) {
      resumed.unfrozen_parameters = {{other, "model.norm"}};
      resumed.output_dir = root_ / "other";
      const Error error = refusal(resumed);
      EXPECT_EQ(error.code(), ErrorCode::invalid_file);
      EXPECT_TRUE(has(error.what(), "unfrozen_parameters that wrote the checkpoint"));
    }
  }
}

TEST_F(AdafactorContract, PagesHoldRemaindersAndNormsOnly) {
  TrainConfig config = adafactor_config();
  const Layout layout = RunSetup(config).layout;
  uint64_t weights = 0, optimizer = 0, norms = 0;
  for (const Page& page : layout.pages) {
    if (page.kind == PageKind::weight) weights += page.bytes;
    if (page.kind == PageKind::optimizer) optimizer += page.bytes;
  }
  for (const Chunk& chunk : layout.table.chunks) norms += chunk.exact > 0 ? 4096 : 0;
  EXPECT_EQ(optimizer, weights + norms) << "2 bytes a parameter, as the weights";
  config.optimizer = OptimizerKind::adamw;
  EXPECT_EQ(layout.nvme_bytes + 4 * weights - norms, RunSetup(config).layout.nvme_bytes);
}

TEST_F(AdafactorContract, DecayChangesTheRun) {
  TrainConfig config = adafactor_config();
  const FinishedRun usual = run_fresh(config);
  config.adafactor_decay = 0.5;
  EXPECT_NE(step_text(usual.lines), step_text(run_fresh(config).lines));
}

}  // namespace
}  // namespace overspill
