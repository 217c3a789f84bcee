// Bad inputs through the real command: its exit code, one line on stderr that names file, place,
// cause and cure, and nothing left behind.
#include <gtest/gtest.h>

#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

class BadInput : public TrainingTest {
 protected:
  void SetUp() override {
    TrainingTest::SetUp();
    for (const bool tied : {false, true}) {
      TrainConfig config = tiny_config(tied);
      config.max_steps = 1;
      config.save_only_model = true;
      const fs::path saved = run(config).report.checkpoint;
      fs::rename(saved, root_ / (tied ? "tied-model" : "model"));
      fs::remove_all(config.output_dir);
      fs::remove_all(root_ / "nvme0");
    }
    write_yaml();
  }

  std::string path(const std::string& name) const { return (root_ / name).string(); }
  std::vector<std::string> from_model(const std::string& name = "model") const {
    return {"init_from_scratch=false", "base_model=" + path(name), "base_model_config=null"};
  }

  void expect_refusal(const Child::Result& result, int exit_code,
                      const std::vector<std::string>& parts) {
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    std::string message;
    std::istringstream stream(result.err);
    size_t messages = 0;
    for (std::string line; std::getline(stream, line);) {
      if (line.starts_with("info: ") || line.starts_with("warning: ")) continue;
      message = line;
      ++messages;
    }
    EXPECT_EQ(messages, 1u) << result.err;
    EXPECT_TRUE(message.starts_with("overspill: ")) << message;
    for (const std::string& part : parts) EXPECT_TRUE(has(message, part));
    EXPECT_EQ(names_in(root_ / "out"), std::vector<std::string>{});
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      EXPECT_NE(entry.path().extension(), ".swap") << entry.path();
    }
  }
  void expect_refusal(const std::vector<std::string>& sets, int exit_code,
                      const std::vector<std::string>& parts) {
    expect_refusal(start(sets).wait(), exit_code, parts);
  }
  void expect_refusal_of_yaml(const std::string& text, int exit_code,
                              const std::vector<std::string>& parts) {
    put_file(root_ / "train.yaml", text);
    expect_refusal(std::vector<std::string>{}, exit_code, parts);
  }
  std::string yaml_text() const { return bytes_of_file(root_ / "train.yaml"); }
};

TEST_F(BadInput, TheInputsAreGoodUntilTheyAreSpoilt) {
  const Child::Result scratch = start({}).wait();
  EXPECT_EQ(scratch.exit_code, 0) << scratch.err;
  fs::remove_all(root_ / "out");
  const Child::Result tuned = start(from_model()).wait();
  EXPECT_EQ(tuned.exit_code, 0) << tuned.err;
}

TEST_F(BadInput, ConfigurationFileMissing) {
  expect_refusal(Child(root_, {"train", path("nowhere.yaml")}, {}).wait(), 1,
                 {"overspill: not_found: ", path("nowhere.yaml"), "No such file or directory"});
  const Child::Result none = Child(root_, {"train"}, {}).wait();
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_TRUE(has(none.err, "config is required"));
}

TEST_F(BadInput, ConfigurationThatIsNoYaml) {
  expect_refusal_of_yaml("sequence_len: 32\ndatasets: [{path: train.bin\nmax_steps: 3\n", 2,
                         {"overspill: invalid_config: ", path("train.yaml") + ":", "not valid YAML",
                          "correct the line"});
  expect_refusal_of_yaml("- 1\n- 2\n", 2, {path("train.yaml"), "accepted: a mapping of keys"});
}

TEST_F(BadInput, UnknownKeys) {
  expect_refusal_of_yaml("learnin_rate: 1e-3\n" + yaml_text(), 2,
                         {path("train.yaml") + ":1", "learnin_rate", "learning_rate"});
  write_yaml();
  expect_refusal({"offload.hostmemory=1GiB"}, 2, {"--set offload.hostmemory", "host_memory"});
}

TEST_F(BadInput, Values) {
  expect_refusal({"sequence_len=0"}, 2, {"sequence_len", "found 0", "from 1 to 1048576"});
  expect_refusal({"offload.host_memory=3parsec"}, 2, {"host_memory", "3parsec", "16GiB"});
  expect_refusal({"precision=fp8"}, 2, {"precision", "fp8", "bf16 or float32"});
  expect_refusal({"learning_rate=fast"}, 2, {"learning_rate", "fast", "a number above 0"});
  expect_refusal({"max_steps=0"}, 2, {"max_steps", "found 0", "at least 1"});
}

TEST_F(BadInput, Contradictions) {
  expect_refusal({"offload.update=in_backward", "offload.gradients=null"}, 2,
                 {"offload.update: in_backward", "max_grad_norm is 1 by default",
                  "set `max_grad_norm: 0`", "`update: next_forward`"});
  expect_refusal({"warmup_steps=1", "warmup_ratio=0.1"}, 2,
                 {"warmup_ratio", "warmup_steps: 1", "keep one of the two"});
  expect_refusal({"offload.nvme_paths=null"}, 2,
                 {"found nvme but no offload.nvme_paths", "`weights: host`"});
  expect_refusal({"eval_steps=5"}, 2, {"eval_steps: found 5", "no evaluation data", "val_set"});
}

TEST_F(BadInput, BaseModelMissing) {
  expect_refusal({"init_from_scratch=false", "base_model_config=null"}, 2,
                 {path("train.yaml"), "base_model: this key is missing", "init_from_scratch"});
  expect_refusal(from_model("nowhere"), 1, {"not_found", path("nowhere")});
  fs::remove(root_ / "model" / "model.safetensors");
  expect_refusal(from_model(), 1, {path("model"), "model.safetensors"});
}

TEST_F(BadInput, ModelConfiguration) {
  const fs::path file = root_ / "model" / "config.json";
  put_file(file, "{\"hidden_size\": ");
  expect_refusal(from_model(), 1, {"invalid_file", file.string()});
  Json shape = shape_json(false);
  shape["architectures"] = {"GPT2LMHeadModel"};
  put_file(file, shape.dump());
  expect_refusal(from_model(), 1, {file.string(), "GPT2LMHeadModel", "LlamaForCausalLM"});
  shape = shape_json(false);
  shape.erase("hidden_size");
  put_file(file, shape.dump());
  expect_refusal(from_model(), 1, {file.string(), "hidden_size"});
}

TEST_F(BadInput, Tensors) {
  const fs::path file = root_ / "model" / "model.safetensors";
  const std::string good = bytes_of_file(file);
  Json shape = shape_json(false);
  shape["intermediate_size"] = 192;
  put_file(root_ / "model" / "config.json", shape.dump());
  expect_refusal(from_model(), 1,
                 {"invalid_file", path("model"), "model.layers.0.mlp.gate_proj.weight", "[192, 64]",
                  "[160, 64]"});
  put_file(root_ / "model" / "config.json", shape_json(false).dump());
  fs::resize_file(file, good.size() - 1000);
  expect_refusal(from_model(), 1, {file.string(), "truncated", "1000 bytes are missing"});
  put_file(file, "not a model");
  expect_refusal(from_model(), 1, {"invalid_file", file.string()});
  put_file(file, good);
  // The tied model stores no lm_head.
  put_file(root_ / "tied-model" / "config.json", shape_json(false).dump());
  expect_refusal(from_model("tied-model"), 1, {path("tied-model"), "lm_head.weight"});
}

TEST_F(BadInput, Tokens) {
  const fs::path file = root_ / "train.bin";
  const std::string good = bytes_of_file(file);
  std::string bad = good;
  bad[2 * 57] = 300 - 256;
  bad[2 * 57 + 1] = 1;
  put_file(file, bad);
  expect_refusal(std::vector<std::string>{}, 1,
                 {"invalid_file", file.string(), "300", "57", "vocabulary"});
  put_file(file, good + "x");
  expect_refusal(std::vector<std::string>{}, 1,
                 {file.string(), "8003 bytes long, expected an even number"});
  put_file(file, "");
  expect_refusal(std::vector<std::string>{}, 1, {file.string(), "empty"});
  put_file(file, good.substr(0, 40));
  expect_refusal(std::vector<std::string>{}, 1,
                 {file.string(), "sequence_len 32", "the longest has 20"});
  put_file(file, "Once upon a time there was a model without a byte tokenizer.");
  expect_refusal({"datasets=[{path: " + file.string() + ", type: text}]"}, 1,
                 {file.string(), "text", "byte tokenizer"});
  fs::remove(file);
  expect_refusal(std::vector<std::string>{}, 1, {"not_found", file.string()});
}

TEST_F(BadInput, Directories) {
  put_file(root_ / "file", "");
  expect_refusal(
      {"offload.nvme_paths=[" + path("file/below") + "]"}, 1,
      {"io: make directory " + path("file/below"), "Not a directory", "set offload.nvme_paths"});
  expect_refusal({"output_dir=" + path("file")}, 1,
                 {"output_dir " + path("file"), "choose another output_dir"});
  expect_refusal(
      {"output_dir=" + path("file/below")}, 1,
      {"output_dir " + path("file/below"), "Not a directory", "choose another output_dir"});
  expect_refusal({"resume_from_checkpoint=" + path("nowhere")}, 1,
                 {"not_found", path("nowhere"), "checkpoint-<step>"});
}

TEST_F(BadInput, Budgets) {
  expect_refusal({"offload.host_memory=4KiB"}, 1,
                 {"does_not_fit: offload.host_memory of 4.00 KiB is ", " short: the run needs ",
                  "set offload.host_memory: "});
  expect_refusal(
      {"offload.device_memory=4KiB"}, 1,
      {"does_not_fit: offload.device_memory of 4.00 KiB is ", "set offload.device_memory: "});
  expect_refusal(
      {"offload.nvme_capacity=1MiB"}, 1,
      {"does_not_fit: offload.nvme_capacity of 1.00 MiB is ", "set offload.nvme_capacity: "});
}

}  // namespace
}  // namespace overspill
