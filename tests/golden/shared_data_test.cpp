// The engine against the project's shared data: a published model's logits and losses, PyTorch's
// training curve, and the token formats. Skipped where the data is absent: it lies in the folder
// that OVERSPILL_TEST_DATA names, by default ../shared/data.
#include <map>

#include "tests/golden/golden_fixture.h"

namespace overspill {
namespace {

using namespace test;

class SharedData : public GoldenTest {
 protected:
  void SetUp() override {
    const char* given = std::getenv("OVERSPILL_TEST_DATA");
    data_ = given != nullptr ? given : OVERSPILL_SOURCE_DIR "/../shared/data";
    if (!fs::exists(data_ / "models/stories260K-hf/config.json")) {
      GTEST_SKIP() << "no test data in " << data_ << "; set OVERSPILL_TEST_DATA to its folder";
    }
    GoldenTest::SetUp();
  }
  void TearDown() override {
    if (!directory_.empty()) GoldenTest::TearDown();
  }

  fs::path model(const std::string& suffix = "") const {
    return data_ / ("models/stories260K-hf" + suffix);
  }
  Json golden_model() const { return read_json(model() / "golden.json"); }
  /// The settings that the golden curve's README names.
  TrainConfig curve_config(Precision precision, uint64_t steps) const {
    TrainConfig config = paged_config(model(), data_ / "formats/nanogpt_train.bin", precision);
    config.sequence_len = 128;
    config.micro_batch_size = 4;
    config.gradient_accumulation_steps = 2;
    config.max_steps = steps;
    config.learning_rate = 1e-3;
    config.adam_beta1 = 0.9;
    config.adam_beta2 = 0.95;
    config.adam_epsilon = 1e-8;
    config.weight_decay = 0.1;
    config.max_grad_norm = 1.0;
    return config;
  }
  Curve golden_curve(const char* key) const {
    return curve_of(read_json(data_ / "golden/stories260K_adamw_20steps.json").at(key));
  }

  fs::path data_;
};

struct Prompt {
  std::vector<int32_t> ids, inputs, targets;
  explicit Prompt(const Json& golden) : ids(golden.at("prompt_ids")), inputs(ids), targets(ids) {
    inputs.pop_back();
    targets.erase(targets.begin());
  }
};

void expect_losses(const LoadedModel& model, const Prompt& prompt, const Json& golden,
                   double tolerance) {
  const std::vector<double> want = golden.at("per_token_ce");
  const std::vector<float> got = model.losses(prompt.inputs, prompt.targets);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
  const double mean = model.loss(prompt.inputs, prompt.targets) / static_cast<double>(want.size());
  EXPECT_NEAR(mean, golden.at("mean_ce_nats").get<double>(), tolerance);
}

TEST_F(SharedData, LogitsOfThePromptAreGolden) {
  const Json golden = golden_model();
  const Prompt prompt(golden);
  const LoadedModel model(this->model(), DType::f32, {1, prompt.ids.size()});
  const std::vector<float> all = model.logits(prompt.ids);
  const std::vector<float> last(all.end() - 512, all.end());
  const std::vector<double> want = golden.at("last_logits_first16");
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(last[i], want[i], 1e-4) << i;
  EXPECT_EQ(std::max_element(last.begin(), last.end()) - last.begin(),
            golden.at("last_logits_argmax").get<int64_t>());
}

TEST_F(SharedData, LossOfEveryTokenIsGolden) {
  const Json golden = golden_model();
  const Prompt prompt(golden);
  const LoadedModel model(this->model(), DType::f32, {1, prompt.inputs.size()});
  expect_losses(model, prompt, golden, 1e-4);
}

TEST_F(SharedData, ShardedDirectoryHoldsTheSameModel) {
  const Json golden = golden_model();
  const Prompt prompt(golden);
  const BatchShape batch{1, prompt.inputs.size()};
  const LoadedModel single(model(), DType::f32, batch),
      sharded(model("-sharded"), DType::f32, batch);
  EXPECT_EQ(single.float_weights(), sharded.float_weights());
  EXPECT_EQ(single.logits(prompt.inputs), sharded.logits(prompt.inputs));
  expect_losses(sharded, prompt, golden, 1e-4);
}

TEST_F(SharedData, Bf16DirectoryIsTheModelRoundedToBf16) {
  const Json golden = golden_model();
  const Prompt prompt(golden);
  const BatchShape batch{1, prompt.inputs.size()};
  const LoadedModel wide(model(), DType::f32, batch), narrow(model("-bf16"), DType::bf16, batch);
  for (size_t layer = 0; layer < wide.float_weights().size(); ++layer) {
    for (size_t i = 0; i < wide.float_weights()[layer].size(); ++i) {
      const float exact = wide.float_weights()[layer][i];
      // Half a unit in the last of bf16's 8 bits.
      ASSERT_NEAR(narrow.float_weights()[layer][i], exact, std::abs(exact) * 0x1p-8) << i;
    }
  }
  // Weights off by up to 2^-9 move a token's loss by some hundredths.
  expect_losses(narrow, prompt, golden, 0.05);
}

TEST_F(SharedData, Float32CurveIsPyTorchs) {
  RunReport report;
  const Curve got = train(curve_config(Precision::float32, 20), &report);
  expect_curve(got, golden_curve("float32"), {1e-4, 1e-4});
  for (const Lane lane : {Lane::nvme_read, Lane::nvme_write, Lane::h2d, Lane::d2h}) {
    EXPECT_GT(report.lane_bytes[static_cast<size_t>(lane)], 0u) << lane_name(lane);
  }
}

TEST_F(SharedData, TwoRanksFollowPyTorchsCurve) {
  for (const uint32_t zero_stage : {0u, 2u, 3u}) {
    expect_curve(train_by_two(curve_config(Precision::float32, 20), zero_stage),
                 golden_curve("float32"), {1e-4, 1e-4});
  }
}

// Gradient norms of this run are chaotic at the 1e-3 level: a rounding of some weight to the other
// bf16 neighbour changes what follows. Measured with tests/golden/reference_trainer.py: the same
// algorithm written twice in PyTorch (that file and the golden's own script) differs by 2.5e-3 in
// grad_norm and 2.5e-4 in loss; rounding the summed gradients to bf16, as the engine does when they
// leave the device, moves grad_norm by 1.7e-3 and ends 3.2e-3 and 2.9e-4 from the golden numbers.
//
// A GPU stores activations and their gradients in bf16 as well: measured 1.5e-3 in loss and 2.8e-2
// in grad_norm.
TEST_F(SharedData, Bf16CurveIsPyTorchsWithFloat32Master) {
  const Curve got = train(curve_config(Precision::bf16, 20));
  const CurvePoint on_host{1e-3, 5e-3}, on_gpu{5e-3, 5e-2};
  expect_curve(got, golden_curve("bf16_weights_fp32_master"), gpu_under_test() ? on_gpu : on_host);
}

/// Inputs and targets of micro-batch `index` of a curve run (4 sequences of 128 tokens).
std::pair<std::vector<int32_t>, std::vector<int32_t>> micro_batch(const TokenFile& file,
                                                                  size_t index) {
  std::vector<int32_t> tokens(4 * 128 + 1);
  file.copy(index * 4 * 128, tokens);
  return {{tokens.begin(), tokens.end() - 1}, {tokens.begin() + 1, tokens.end()}};
}

TEST_F(SharedData, ExportedCheckpointContinuesTheCurve) {
  const auto file =
      open_token_file({.path = data_ / "formats/nanogpt_train.bin", .vocab_size = 512});
  for (const Precision precision : {Precision::float32, Precision::bf16}) {
    const Curve longer = train(curve_config(precision, 4));
    RunReport report;
    train(curve_config(precision, 3), &report);
    const DType type = precision == Precision::bf16 ? DType::bf16 : DType::f32;
    const LoadedModel exported(report.checkpoint, type, {4, 128});
    double loss = 0;
    for (size_t i = 6; i < 8; ++i) {  // the fourth step's
      const auto [inputs, targets] = micro_batch(*file, i);
      loss += exported.loss(inputs, targets);
    }
    EXPECT_EQ(loss / 1024, longer[3].loss) << "the very weights that the fourth step used";
  }
}

/// Reads a safetensors file with nothing of the engine's: {name: bytes}.
std::map<std::string, std::string> plain_safetensors(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  std::map<std::string, std::string> tensors;
  const Json header = Json::parse(bytes.substr(8, length));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const uint64_t first = entry.at("data_offsets")[0], last = entry.at("data_offsets")[1];
    tensors[name] = bytes.substr(8 + length + first, last - first);
  }
  return tensors;
}

TEST_F(SharedData, ExportWithoutLearningIsTheModelItself) {
  TrainConfig config = curve_config(Precision::float32, 1);
  config.learning_rate = 0;
  RunReport report;
  train(config, &report);
  const auto before = plain_safetensors(model() / "model.safetensors");
  const auto after = plain_safetensors(report.checkpoint / "model.safetensors");
  EXPECT_FALSE(after.empty());
  EXPECT_EQ(before == after, true) << "tensors' names or bytes differ";
}

TEST_F(SharedData, EveryTokenFormatHoldsTheSameStream) {
  const Json expected = read_json(data_ / "formats/expected.json");
  const size_t count = expected.at("tokens");
  Curve first_curve;
  for (const auto& [name, format] :
       {std::pair{"nanogpt_train.bin", TokenFormat::nanogpt},
        std::pair{"llmc_gpt2style_u16.bin", TokenFormat::llmc},
        std::pair{"llmc_llama3style_u32.bin", TokenFormat::llmc},
        std::pair{"megatron_text_document.bin", TokenFormat::megatron}}) {
    SCOPED_TRACE(name);
    const auto file = open_token_file({.path = data_ / "formats" / name, .vocab_size = 512});
    EXPECT_EQ(file->format(), format);
    ASSERT_EQ(file->token_count(), count);
    std::vector<int32_t> tokens(count), stream(count);
    file->copy(0, tokens);
    EXPECT_EQ(std::vector<int32_t>(tokens.begin(), tokens.begin() + 16),
              expected.at("first16").get<std::vector<int32_t>>());
    EXPECT_EQ(std::vector<int32_t>(tokens.end() - 8, tokens.end()),
              expected.at("last8").get<std::vector<int32_t>>());
    open_token_file({.path = data_ / "formats/nanogpt_train.bin", .vocab_size = 512})
        ->copy(0, stream);
    EXPECT_EQ(tokens == stream, true) << "another token stream";
    TrainConfig config = curve_config(Precision::float32, 1);
    config.datasets = {{.path = data_ / "formats" / name}};
    const Curve curve = train(config);
    if (first_curve.empty()) first_curve = curve;
    ASSERT_EQ(curve.size(), 1u);
    EXPECT_EQ(curve[0].loss, first_curve[0].loss);
    EXPECT_EQ(curve[0].grad_norm, first_curve[0].grad_norm);
  }
}

}  // namespace
}  // namespace overspill
