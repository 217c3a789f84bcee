// Where `overspill bench` writes: its progress on stderr, and the files asked for.
#pragma once

#include <chrono>
#include <string>

#include "bindings/cli/bench_command.h"
#include "engine/plan/profile.h"

namespace overspill {

/// A line rewritten in place on a terminal, plain lines otherwise; on stderr.
class BenchProgressLine {
 public:
  explicit BenchProgressLine(std::string prefix = "") : prefix_(std::move(prefix)) {}
  ~BenchProgressLine();
  void show(size_t done, size_t total, const std::string& text);

 private:
  std::string left(size_t done, size_t total) const;

  const std::string prefix_;
  const bool terminal_ = is_terminal();
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool open_ = false;

  static bool is_terminal();
};

/// Before minutes of work: throws Error(invalid_config) for a file that could not be written.
void check_output(const std::filesystem::path& path, const char* option);
void check_outputs(const BenchArguments& arguments);

/// Writes the files that were asked for, and says where the profile is.
void write_outputs(const BenchArguments& arguments, const std::string& json,
                   const std::string& html, const HardwareProfile& profile,
                   const std::string& comment);

}  // namespace overspill
