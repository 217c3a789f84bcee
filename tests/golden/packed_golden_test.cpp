// Documents packed into sequences and trained on in part, against PyTorch, which ran every document
// alone (packed_pytorch.py).
#include <algorithm>
#include <sstream>

#include "tests/golden/golden_fixture.h"
#include "tests/unit/engine/train/prepared_file.h"

namespace overspill {
namespace {

using namespace test;

const fs::path kSource = OVERSPILL_SOURCE_DIR;

std::vector<int32_t> license_tokens(size_t count) {
  std::ifstream stream(kSource / "LICENSE", std::ios::binary);
  std::vector<int32_t> tokens;
  for (char c; tokens.size() < count && stream.get(c);) {
    tokens.push_back(static_cast<uint8_t>(c) + 3);
  }
  return tokens;
}

class PackedGolden : public GoldenTest {
 protected:
  void SetUp() override {
    GoldenTest::SetUp();
    PreparedFile file{.tokens = {}, .starts = {}, .vocab_size = 259};
    for (const char bit : golden_.at("trained").get<std::string>()) {
      file.trained.push_back(bit == '1');
    }
    for (const int32_t token : license_tokens(file.trained.size())) {
      file.tokens.push_back(static_cast<uint32_t>(token));
    }
    std::istringstream starts(golden_.at("starts").get<std::string>());
    for (uint64_t start = 0; starts >> start;) file.starts.push_back(start);
    file.sequence_len = golden_.at("settings").at("sequence_len");
    std::ofstream(directory_ / "train.tokens", std::ios::binary) << file.bytes();
  }

  TrainConfig config() const {
    const Json& s = golden_.at("settings");
    TrainConfig config =
        paged_config(kSource / "tests/demo/model", directory_ / "train.tokens", Precision::float32);
    config.sequence_len = s.at("sequence_len");
    config.micro_batch_size = s.at("micro_batch");
    config.gradient_accumulation_steps = s.at("accumulation");
    config.max_steps = s.at("steps").get<uint64_t>();
    config.learning_rate = s.at("learning_rate");
    config.weight_decay = s.at("weight_decay");
    config.adam_beta1 = s.at("beta1");
    config.adam_beta2 = s.at("beta2");
    config.adam_epsilon = s.at("epsilon");
    config.max_grad_norm = s.at("max_grad_norm");
    return config;
  }

  const Json golden_ = read_json(kSource / "tests/golden/packed_pytorch.json");
};

TEST_F(PackedGolden, CurveIsPyTorchs) {
  expect_curve(train(config()), curve_of(golden_.at("curve")), {1e-5, 1e-5});
  std::ifstream stream(config().output_dir / "metrics.jsonl");
  for (const Json& point : golden_.at("curve")) {
    std::string line;
    ASSERT_TRUE(std::getline(stream, line));
    EXPECT_EQ(Json::parse(line).at("trained_tokens"), point.at("trained_tokens"));
  }
}

TEST_F(PackedGolden, TwoRanksFollowPyTorchsCurve) {
  if (gpu_under_test()) GTEST_SKIP() << "two ranks need a GPU each";
  for (const uint32_t zero_stage : {0u, 3u}) {
    expect_curve(train_by_two(config(), zero_stage), curve_of(golden_.at("curve")), {1e-5, 1e-5});
  }
}

TEST_F(PackedGolden, PackedDocumentsHaveTheLossesThatTheyHaveAlone) {
  constexpr size_t kFirst = 90, kSecond = 200;
  const std::vector<int32_t> all = license_tokens(kFirst + kSecond + 1);
  const auto slice = [&](size_t begin, size_t count) {
    return std::vector<int32_t>(all.begin() + static_cast<ptrdiff_t>(begin),
                                all.begin() + static_cast<ptrdiff_t>(begin + count));
  };
  const auto losses = [&](size_t begin, size_t count, const std::vector<int32_t>& begins = {}) {
    const LoadedModel model(kSource / "tests/demo/model", DType::f32, {1, count});
    return model.losses(slice(begin, count), slice(begin + 1, count), begins);
  };
  std::vector<float> alone = losses(0, kFirst);
  const std::vector<float> second = losses(kFirst, kSecond);
  alone.insert(alone.end(), second.begin(), second.end());
  std::vector<int32_t> begins(kFirst, 0);
  begins.resize(kFirst + kSecond, kFirst);
  const std::vector<float> packed = losses(0, kFirst + kSecond, begins);
  ASSERT_EQ(packed.size(), alone.size());
  for (size_t i = 0; i < packed.size(); ++i) EXPECT_NEAR(packed[i], alone[i], 2e-5) << i;
  const std::vector<float> mixed = losses(0, kFirst + kSecond);
  EXPECT_GT(std::abs(mixed[kFirst + 9] - alone[kFirst + 9]), 1e-3) << "documents do not matter";
}

}  // namespace
}  // namespace overspill
