// What tests of whole runs share: a tiny Llama and its tokens in a temporary directory, runs of a
// Trainer in this process, and runs of the real command in a child process.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "engine/train/trainer.h"

namespace overspill::test {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Files = std::map<std::string, std::string>;  ///< name -> bytes

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

inline std::string bytes_of_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
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

/// The command in a child process, its output in files. Killed when it is not waited for.
class Child {
 public:
  struct Result {
    int exit_code = -1;  ///< -1 when a signal ended it
    int signal = 0;
    bool timed_out = false;
    std::string out, err;
  };
  struct Options {
    std::optional<size_t> cpus;  ///< run on only so many of the CPUs that this process may use
  };

  Child(const fs::path& directory, const std::vector<std::string>& arguments,
        const Options& options)
      : stem_(directory / ("child-" + std::to_string(++counter()))) {
    std::vector<std::string> words = {OVERSPILL_BINARY};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const cpu_set_t cpus = allowed_cpus(options.cpus.value_or(CPU_SETSIZE));
    const std::string out = stem_ + ".out", err = stem_ + ".err";
    pid_ = fork();
    if (pid_ != 0) return;
    if (options.cpus) sched_setaffinity(0, sizeof(cpus), &cpus);
    const int to_out = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int to_err = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (dup2(to_out, 1) < 0 || dup2(to_err, 2) < 0) _exit(126);
    execv(argv[0], argv.data());
    _exit(127);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void send(int signal) const {
    if (pid_ > 0) ::kill(pid_, signal);
  }
  std::string out() const { return bytes_of_file(stem_ + ".out"); }

  /// Waits until the condition holds; false when the child ended or the time is over.
  bool wait_until(const std::function<bool()>& condition, double seconds = 60) {
    for (double waited = 0; waited < seconds; waited += 0.002) {
      if (condition()) return true;
      if (ended()) return condition();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }
  /// Waits for the end; a child that hangs is killed.
  Result wait(double seconds = 60) {
    Result result;
    result.timed_out = !wait_until([&] { return ended(); }, seconds);
    if (result.timed_out) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, &status_, 0);
      pid_ = -1;
    }
    if (WIFEXITED(status_)) result.exit_code = WEXITSTATUS(status_);
    if (WIFSIGNALED(status_)) result.signal = WTERMSIG(status_);
    result.out = bytes_of_file(stem_ + ".out");
    result.err = bytes_of_file(stem_ + ".err");
    return result;
  }

  static cpu_set_t allowed_cpus(size_t most) {
    cpu_set_t allowed, chosen;
    CPU_ZERO(&chosen);
    sched_getaffinity(0, sizeof(allowed), &allowed);
    for (size_t cpu = 0, count = 0; cpu < CPU_SETSIZE && count < most; ++cpu) {
      if (CPU_ISSET(cpu, &allowed) && ++count) CPU_SET(cpu, &chosen);
    }
    return chosen;
  }

 private:
  static int& counter() {
    static int count = 0;
    return count;
  }
  bool ended() {
    if (pid_ <= 0) return true;
    if (waitpid(pid_, &status_, WNOHANG) != pid_) return false;
    pid_ = -1;
    return true;
  }

  std::string stem_;
  pid_t pid_ = -1;
  int status_ = 0;
};

/// A temporary directory with a tiny model's shape and tokens; removed at the end.
class TrainingTest : public testing::Test {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::off);
    std::string name = (fs::temp_directory_path() / "overspill-training-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    for (const bool tied : {true, false}) {
      fs::create_directory(shape_of(tied));
      put_file(shape_of(tied) / "config.json", shape_json(tied).dump());
    }
    put_file(root_ / "train.bin", token_bytes(4001, 1));
    put_file(root_ / "val.bin", token_bytes(601, 2));
  }
  void TearDown() override {
    for (auto command = undo_.rbegin(); command != undo_.rend(); ++command) {
      EXPECT_TRUE(shell(*command)) << *command;
    }
    fs::remove_all(root_);
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

  /// The trimmed output of a shell command, or nothing when it failed.
  static std::optional<std::string> shell(const std::string& command) {
    FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
    if (pipe == nullptr) return std::nullopt;
    std::string output;
    std::array<char, 256> line;
    while (fgets(line.data(), line.size(), pipe) != nullptr) output += line.data();
    if (pclose(pipe) != 0) return std::nullopt;
    while (!output.empty() && output.back() == '\n') output.pop_back();
    return output;
  }
  /// Mounts a new ext4 of `mebibytes` on root_/small; false when not permitted.
  bool mount_small_disk(int mebibytes) {
    const std::string disk = root_ / "disk", mounted = root_ / "small";
    fs::create_directory(mounted);
    if (!shell("truncate -s " + std::to_string(mebibytes) + "M " + disk)) return false;
    if (!shell("mkfs.ext4 -q -m 0 -O ^has_journal " + disk)) return false;
    const auto device = shell("losetup -f --show " + disk);
    if (!device) return false;
    undo_.push_back("losetup -d " + *device);
    if (!shell("mount " + *device + " " + mounted)) return false;
    // A deleted swap file that something still holds open makes the first one fail.
    undo_.push_back("umount " + mounted + " || { umount -l " + mounted + "; false; }");
    return true;
  }

  static constexpr uint64_t kVocabulary = 300;
  fs::path root_;

 private:
  std::vector<std::string> undo_;
  int runs_ = 0;
};

}  // namespace overspill::test
