// What tests of whole runs share: a tiny Llama and its tokens in a temporary directory, runs of a
// Trainer in this process, and configurations for the real command.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "engine/train/trainer.h"
#include "tests/fault/child_process.h"
#include "tests/fault/disk_fixture.h"

namespace overspill::test {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Files = std::map<std::string, std::string>;  ///< name -> bytes

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

inline void put_file(const fs::path& path, const std::string& bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream << bytes;
  ASSERT_TRUE(stream.flush()) << path;
}

inline Files files_in(const fs::path& directory) {
  Files files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.is_regular_file()) files[entry.path().filename()] = bytes_of_file(entry.path());
  }
  return files;
}

inline std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

inline std::vector<Json> metrics_of(const fs::path& output_dir) {
  std::istringstream stream(bytes_of_file(output_dir / "metrics.jsonl"));
  std::vector<Json> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

/// What must not depend on placement of each training step's line, as text.
inline std::string step_text(const std::vector<Json>& lines) {
  std::string text;
  for (const Json& line : lines) {
    if (!line.contains("loss")) continue;
    for (const char* key :
         {"step", "loss", "grad_norm", "learning_rate", "tokens", "update_skipped"}) {
      text += std::string(key) + " " + line.at(key).dump() + " ";
    }
    text += "\n";
  }
  return text;
}

/// Equal names and bytes; a difference names the file, not its megabytes.
inline void expect_same_files(const Files& left, const Files& right) {
  EXPECT_EQ(left.size(), right.size());
  for (const auto& [name, bytes] : left) {
    const auto found = right.find(name);
    if (found == right.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    EXPECT_TRUE(bytes == found->second) << name << " differs";
  }
}

/// A run of the Trainer that came to its end.
struct FinishedRun {
  RunReport report;
  std::vector<Json> lines;
  Files checkpoint;  ///< of its last save

  const Json& final() const { return lines.back(); }
  std::vector<Json> steps() const {
    std::vector<Json> found;
    for (const Json& line : lines) {
      if (line.contains("loss")) found.push_back(line);
    }
    return found;
  }
};

inline void expect_same_results(const FinishedRun& left, const FinishedRun& right) {
  EXPECT_FALSE(left.steps().empty());
  EXPECT_EQ(step_text(left.lines), step_text(right.lines));
  EXPECT_TRUE(left.checkpoint.contains("model.safetensors"));
  expect_same_files(left.checkpoint, right.checkpoint);
}

/// A temporary directory with a tiny model's shape and tokens; removed at the end.
class TrainingTest : public DiskTest {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::off);
    ASSERT_NO_FATAL_FAILURE(DiskTest::SetUp());
    for (const bool tied : {true, false}) {
      fs::create_directory(shape_of(tied));
      put_file(shape_of(tied) / "config.json", shape_json(tied).dump());
    }
    put_file(root_ / "train.bin", token_bytes(4001, 1));
    put_file(root_ / "val.bin", token_bytes(601, 2));
  }
  void TearDown() override {
    DiskTest::TearDown();
    set_log_level(LogLevel::info);
  }

  fs::path shape_of(bool tied) const { return root_ / (tied ? "tied" : "untied"); }

  static Json shape_json(bool tied) {
    return {{"architectures", {"LlamaForCausalLM"}},
            {"model_type", "llama"},
            {"hidden_act", "silu"},
            {"hidden_size", 64},
            {"intermediate_size", 160},
            {"num_hidden_layers", 3},
            {"num_attention_heads", 4},
            {"num_key_value_heads", 2},
            {"vocab_size", kVocabulary},
            {"max_position_embeddings", 128},
            {"rms_norm_eps", 1e-6},
            {"initializer_range", 0.05},
            {"tie_word_embeddings", tied}};
  }

  /// nanoGPT's format: uint16, no header.
  static std::string token_bytes(size_t count, uint64_t key) {
    std::string bytes;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t token = random_below(key, i, kVocabulary);
      bytes += static_cast<char>(token & 0xff);
      bytes += static_cast<char>(token >> 8);
    }
    return bytes;
  }

  /// Three small steps with all state on one drive; budgets are ample.
  TrainConfig tiny_config(bool tied = false) const {
    TrainConfig config;
    config.init_from_scratch = true;
    config.base_model_config = shape_of(tied);
    config.datasets = {{.path = root_ / "train.bin", .type = TokenFormat::nanogpt}};
    config.sequence_len = 32;
    config.gradient_accumulation_steps = 2;
    config.max_steps = 3;
    config.learning_rate = 1e-2;
    config.lr_scheduler = LrScheduler::constant;
    config.weight_decay = 0.01;
    config.output_dir = root_ / "out";
    config.logging_steps = 1000;
    config.offload.device_memory = 64 * kMiB;
    config.offload.host_memory = 64 * kMiB;
    config.offload.nvme_paths = {root_ / "nvme0"};
    config.offload.chunk_parameters = 16384;
    place_all(config, Placement::nvme);
    return config;
  }
  static void place_all(TrainConfig& config, Placement placement) {
    OffloadConfig& o = config.offload;
    o.weights = o.optimizer = o.gradients = o.activations = placement;
  }
  static void update_in_backward(TrainConfig& config) {
    config.max_grad_norm = 0;
    config.offload.update = UpdateTiming::in_backward;
    config.offload.gradients = Placement::automatic;
  }

  static FinishedRun run(const TrainConfig& config) {
    FinishedRun finished;
    const std::atomic<bool> stop{false};
    testing::internal::CaptureStdout();
    try {
      Trainer trainer(config);
      finished.report = trainer.run(stop);
    } catch (...) {
      testing::internal::GetCapturedStdout();
      throw;
    }
    testing::internal::GetCapturedStdout();
    finished.lines = metrics_of(config.output_dir);
    finished.checkpoint = files_in(finished.report.checkpoint);
    return finished;
  }
  /// A run with an output directory that nothing else has used.
  FinishedRun run_fresh(TrainConfig config) {
    config.output_dir = root_ / ("out-" + std::to_string(++runs_));
    FinishedRun finished = run(config);
    fs::remove_all(config.output_dir);
    return finished;
  }
  /// The Error that a run ends in.
  static Error refusal(const TrainConfig& config) {
    try {
      run(config);
    } catch (const Error& error) {
      return error;
    }
    return {ErrorCode::internal, "nothing was refused"};
  }

  /// The configuration of tiny_config() for the command; more comes from `--set`.
  fs::path write_yaml(const std::string& more = "", const std::string& more_offload = "") const {
    const fs::path path = root_ / "train.yaml";
    put_file(path,
             "base_model_config: untied\ninit_from_scratch: true\n"
             "datasets: [{path: train.bin, type: nanogpt}]\nsequence_len: 32\n"
             "gradient_accumulation_steps: 2\nmax_steps: 3\nlearning_rate: 0.01\n"
             "lr_scheduler: constant\nweight_decay: 0.01\noutput_dir: out\n" +
                 more +
                 "offload:\n  device_memory: 64MiB\n  host_memory: 64MiB\n"
                 "  nvme_paths: [nvme0]\n  chunk_parameters: 16384\n  weights: nvme\n"
                 "  optimizer: nvme\n  gradients: nvme\n  activations: nvme\n" +
                 more_offload);
    return path;
  }
  Child start(const std::vector<std::string>& sets, const Child::Options& options = {}) const {
    std::vector<std::string> arguments = {"train", root_ / "train.yaml"};
    for (const std::string& set : sets) {
      arguments.push_back("--set");
      arguments.push_back(set);
    }
    return Child(root_, arguments, options);
  }

  static constexpr uint64_t kVocabulary = 300;

 private:
  int runs_ = 0;
};

}  // namespace overspill::test
