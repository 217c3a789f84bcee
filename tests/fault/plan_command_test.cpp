// `overspill plan` as people call it: with a config.json and a profile, without weights and drives.
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/base/fd.h"
#include "tests/fault/training_fixture.h"

namespace overspill::test {
namespace {

constexpr const char* kLlama405B =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384,
"intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false, "hidden_act": "silu",
"torch_dtype": "bfloat16"})";

class PlanCommandTest : public TrainingTest {
 protected:
  Child::Result plan(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "plan");
    return Child(root_, arguments, {}).wait();
  }
  std::string profile(const std::string& name) const {
    return std::string(OVERSPILL_SOURCE_DIR) + "/profiles/" + name + ".yaml";
  }
};

TEST_F(PlanCommandTest, PlansTheLargestModelFromItsShapeAlone) {
  put_file(root_ / "config.json", kLlama405B);
  const Child::Result result =
      plan({root_ / "config.json", "--hardware", profile("4x-rtx-pro-6000-8-gen5-enterprise"),
            "--set", "gradient_accumulation_steps=8", "--json", root_ / "plan.json", "--html",
            root_ / "plan.html", "--no-advice"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(has(result.out, "405.85B parameters in 128 layers")) << result.out;
  EXPECT_TRUE(has(result.out, "4 ranks share each layer's parameters"));
  const Json json = Json::parse(read_text_file(root_ / "plan.json"));
  EXPECT_EQ(json.at("tokens_per_step"), 131072.0);
  EXPECT_GT(json.at("step_seconds").get<double>(), 100);
  EXPECT_LT(json.at("step_seconds").get<double>(), 10000);
  EXPECT_LE(json.at("speed_of_light").at("seconds").get<double>(),
            json.at("step_seconds").get<double>());
}

TEST_F(PlanCommandTest, EveryShippedProfileLoads) {
  write_yaml();
  size_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(OVERSPILL_SOURCE_DIR) + "/profiles")) {
    const Child::Result result = plan({root_ / "train.yaml", "--hardware", entry.path(),
                                       "--no-advice", "--set", "offload.device_memory=256MiB"});
    EXPECT_EQ(result.exit_code, 0) << entry.path() << ": " << result.err;
    ++count;
  }
  EXPECT_GE(count, 7u);
}

TEST_F(PlanCommandTest, ImpossibleAsksSayWhatIsShort) {
  put_file(root_ / "config.json", kLlama405B);
  const Child::Result result =
      plan({root_ / "config.json", "--hardware", profile("1x-rtx-4090-1-drive"), "--no-advice"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(has(result.err, "does_not_fit: offload.device_memory of ")) << result.err;
  EXPECT_TRUE(has(result.err, "short: the run needs at least ")) << result.err;
}

TEST_F(PlanCommandTest, WritesATraceAndNeedsNoDatasets) {
  write_yaml();
  std::filesystem::remove(root_ / "train.bin");
  const Child::Result result = plan({root_ / "train.yaml", "--trace", root_ / "trace.json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(Json::parse(read_text_file(root_ / "trace.json")).at("traceEvents").empty());
}

}  // namespace
}  // namespace overspill::test
