// Output of benchmarks.
#include "bindings/cli/bench_output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "engine/plan/profile_file.h"

namespace overspill {

void check_output(const std::filesystem::path& path, const char* option) {
  if (path.empty()) return;
  const auto parent = std::filesystem::absolute(path).parent_path();
  const bool there = std::filesystem::exists(path);
  if (std::filesystem::is_directory(path) || ::access(parent.c_str(), W_OK | X_OK) != 0 ||
      (there && ::access(path.c_str(), W_OK) != 0)) {
    fail(ErrorCode::invalid_config, "{} {}: cannot be written; name a file in a directory that can",
         option, path.string());
  }
}

bool BenchProgressLine::is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

BenchProgressLine::~BenchProgressLine() {
  if (open_) fmt::print(stderr, "\n");
}

void BenchProgressLine::show(size_t done, size_t total, const std::string& text) {
  if (!terminal_) {
    fmt::print(stderr, "[{}/{}] {}{}\n", done, total, prefix_, text);
    return;
  }
  fmt::print(stderr, "\r\x1b[K[{}/{}{}] {}{}", done, total, left(done, total), prefix_, text);
  std::fflush(stderr);
  open_ = true;
}

std::string BenchProgressLine::left(size_t done, size_t total) const {
  if (done == 0) return "";
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
  const auto rest = static_cast<double>(total - done) / static_cast<double>(done);
  return fmt::format(", {} left", format_seconds(passed.count() * rest));
}

void check_outputs(const BenchArguments& arguments) {
  check_output(arguments.json, "--json");
  check_output(arguments.html, "--html");
  check_output(arguments.profile, "--profile");
}

void write_outputs(const BenchArguments& arguments, const std::string& json,
                   const std::string& html, const HardwareProfile& profile,
                   const std::string& comment) {
  if (!arguments.json.empty()) write_text_file(arguments.json, json);
  if (!arguments.html.empty()) write_text_file(arguments.html, html);
  if (arguments.profile.empty()) return;
  save_profile(arguments.profile, profile, comment);
  fmt::print("profile        {} (offload.hardware_profile of a training file)\n",
             arguments.profile.string());
}

}  // namespace overspill
