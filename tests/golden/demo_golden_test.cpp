// The engine against numbers that an independent PyTorch reference (make_goldens.py) computed from
// the demo's model and the repository's LICENSE. Needs nothing outside the repository.
#include <algorithm>

#include "tests/golden/golden_fixture.h"

namespace overspill {
namespace {

using namespace test;

const fs::path kSource = OVERSPILL_SOURCE_DIR;

class DemoGolden : public GoldenTest {
 protected:
  TrainConfig config(Precision precision) const {
    const Json& s = golden_.at("settings");
    TrainConfig config = paged_config(kSource / "tests/demo/model", kSource / "LICENSE", precision);
    config.sequence_len = s.at("sequence_len");
    config.micro_batch_size = s.at("micro_batch");
    config.gradient_accumulation_steps = s.at("accumulation");
    config.max_steps = s.at("steps").get<uint64_t>();
    config.learning_rate = s.at("learning_rate");
    config.lr_scheduler = LrScheduler::cosine;
    config.warmup_steps = s.at("warmup_steps").get<uint64_t>();
    config.weight_decay = s.at("weight_decay");
    config.adam_beta1 = s.at("beta1");
    config.adam_beta2 = s.at("beta2");
    config.adam_epsilon = s.at("epsilon");
    config.max_grad_norm = s.at("max_grad_norm");
    return config;
  }

  const Json golden_ = read_json(kSource / "tests/golden/demo_model.json");
};

TEST_F(DemoGolden, LogitsAndLossOfEveryToken) {
  std::vector<int32_t> ids;
  for (const char c : golden_.at("prompt").get<std::string>()) ids.push_back(c + 3);
  std::vector<int32_t> inputs(ids.begin(), ids.end() - 1), targets(ids.begin() + 1, ids.end());
  for (const DType type : {DType::f32, DType::bf16}) {  // the stored weights are bf16
    SCOPED_TRACE(dtype_name(type));
    const LoadedModel model(kSource / "tests/demo/model", type, {1, ids.size()});
    const std::vector<double> logits = golden_.at("last_logits");
    const std::vector<float> all = model.logits(ids);
    ASSERT_EQ(all.size(), ids.size() * logits.size());
    for (size_t i = 0; i < logits.size(); ++i) {
      EXPECT_NEAR(all[all.size() - logits.size() + i], logits[i], 1e-4) << i;
    }
    const LoadedModel shorter(kSource / "tests/demo/model", type, {1, inputs.size()});
    const std::vector<double> want = golden_.at("token_losses");
    const std::vector<float> got = shorter.losses(inputs, targets);
    ASSERT_EQ(got.size(), want.size());
    double sum = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(got[i], want[i], 1e-4) << i;
      sum += want[i];
    }
    EXPECT_NEAR(shorter.loss(inputs, targets), sum, 1e-5 * sum);
  }
}

TEST_F(DemoGolden, Float32CurveIsPyTorchs) {
  expect_curve(train(config(Precision::float32)), curve_of(golden_.at("curves").at("float32")),
               {1e-4, 1e-4});
}

TEST_F(DemoGolden, TwoRanksFollowPyTorchsCurve) {
  for (const uint32_t zero_stage : {0u, 2u, 3u}) {
    expect_curve(train_by_two(config(Precision::float32), zero_stage),
                 curve_of(golden_.at("curves").at("float32")), {1e-4, 1e-4});
  }
}

TEST_F(DemoGolden, CurveWithFrozenTensorsAndGroupsIsPyTorchs) {
  const Json& groups = golden_.at("groups");
  TrainConfig frozen = config(Precision::float32);
  frozen.unfrozen_parameters = groups.at("unfrozen").get<std::vector<std::string>>();
  for (const auto& [part, rate] : groups.at("lr_groups").items()) {
    frozen.lr_groups.push_back({part, {part}, rate.get<double>()});
  }
  const Curve all = curve_of(golden_.at("curves").at("float32"));
  const Curve want = curve_of(golden_.at("curves").at("groups"));
  EXPECT_LT(want[0].grad_norm, 0.9 * all[0].grad_norm) << "of fewer tensors";
  expect_curve(train(frozen), want, {1e-4, 1e-4});
}

TEST_F(DemoGolden, Bf16CurveIsPyTorchsWithFloat32Master) {
  // Single weights may round to the other bf16 neighbour: 1e-3 in the loss, more in its gradient.
  expect_curve(train(config(Precision::bf16)), curve_of(golden_.at("curves").at("bf16")),
               {1e-3, 3e-3});
}

}  // namespace
}  // namespace overspill
