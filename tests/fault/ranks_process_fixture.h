// Runs of several ranks by the real command, as launchers start them: processes with a mark in
// their environment, by which a test finds what is left of them.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/training_fixture.h"

namespace overspill::test {

using Words = std::vector<std::string>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

class RanksProcessTest : public TrainingTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(TrainingTest::SetUp());
    write_yaml("precision: float32\ndeterministic_reduction: true\nlogging_steps: 1\n");
  }

  /// The words of `overspill train` into root_/`output`.
  Words train_words(const std::string& output, const Words& sets, uint32_t ranks = 0) const {
    Words words = {"train", root_ / "train.yaml", "--set",
                   "output_dir=" + (root_ / output).string()};
    for (const std::string& set : sets) words.insert(words.end(), {"--set", set});
    if (ranks > 0) words.insert(words.end(), {"--ranks", std::to_string(ranks)});
    return words;
  }
  /// By the command's own launcher.
  std::unique_ptr<Child> launch(uint32_t ranks, const std::string& output,
                                const Words& sets = {}) const {
    return start_program(OVERSPILL_BINARY, train_words(output, sets, ranks), {mark(output)});
  }
  /// Some program, in an environment without any launcher's variables but these.
  std::unique_ptr<Child> start_program(const std::string& program, const Words& words,
                                       const Words& environment = {}) const {
    Words variables = {mark("any")};
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                             "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
      variables.emplace_back(name);
    }
    variables.insert(variables.end(), environment.begin(), environment.end());
    return std::make_unique<Child>(
        root_, words, Child::Options{.cpus = {}, .program = program, .environment = variables});
  }

  /// Processes that work for the output, or for any.
  std::vector<pid_t> processes(const std::string& output = "") const {
    std::vector<pid_t> found;
    std::string wanted = mark(output);
    if (output.empty()) wanted.pop_back();
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string environment = bytes_of_file(entry.path() / "environ");
      if (environment.find(wanted) != std::string::npos) found.push_back(std::atoi(name.c_str()));
    }
    return found;
  }
  /// The process that runs a rank of the launcher; 0 when it is not there (yet).
  static pid_t rank_process(pid_t launcher, uint32_t rank) {
    const std::string pid = std::to_string(launcher);
    std::istringstream children(bytes_of_file("/proc/" + pid + "/task/" + pid + "/children"));
    for (pid_t child = 0; children >> child;) {
      const std::string environment = bytes_of_file("/proc/" + std::to_string(child) + "/environ");
      if (has_variable(environment, "RANK=" + std::to_string(rank))) return child;
    }
    return 0;
  }
  /// Processes end a moment after who waits for them has been told.
  void expect_nobody_left(const std::string& output = "", double seconds = 1) const {
    for (double waited = 0; waited < seconds && !processes(output).empty(); waited += 0.01) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    for (const pid_t process : processes(output)) {
      ADD_FAILURE() << "process " << process << " of " << output
                    << " is left: " << bytes_of_file(fmt::format("/proc/{}/stat", process));
      kill(process, SIGKILL);
    }
  }
  bool wait_for_line(Child& child, const std::string& output, int64_t line) const {
    return child.wait_until([&] {
      const std::string text = bytes_of_file(root_ / output / "metrics.jsonl");
      return std::count(text.begin(), text.end(), '\n') >= line;
    });
  }

  /// Steps and files of a run that has ended.
  struct Outcome {
    std::string steps;
    Files checkpoint;
  };
  Outcome outcome(const std::string& output) const {
    return {step_text(metrics_of(root_ / output)), files_in(root_ / output / "latest")};
  }
  static void expect_same(const Outcome& left, const Outcome& right) {
    EXPECT_FALSE(left.steps.empty());
    EXPECT_EQ(left.steps, right.steps);
    EXPECT_TRUE(left.checkpoint.contains("model.safetensors"));
    EXPECT_TRUE(left.checkpoint.contains("optimizer.safetensors"));
    expect_same_files(left.checkpoint, right.checkpoint);
  }

  static std::string last_line(std::string text) {
    while (text.ends_with('\n')) text.pop_back();
    return text.substr(text.rfind('\n') + 1);
  }
  static size_t count_of(const std::string& text, const std::string& part) {
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
      ++count;
    }
    return count;
  }

 private:
  static bool has_variable(const std::string& environment, const std::string& variable) {
    return ('\0' + environment).find('\0' + variable + '\0') != std::string::npos;
  }
  std::string mark(const std::string& output) const {
    return fmt::format("OVERSPILL_TEST_MARK={}/{}/", root_.string(), output);
  }
};

}  // namespace overspill::test
