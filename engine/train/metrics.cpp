// Metrics, peak memory and progress.
#include "engine/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

/// The lines of an earlier run up to and including the step; a torn last line is dropped.
std::string kept_lines(const std::filesystem::path& path, uint64_t step) {
  std::istringstream lines(read_text_file(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_discarded() || !object.contains("step")) continue;
    if (object["step"].get<uint64_t>() <= step && !object.contains("final")) kept += line + "\n";
  }
  return kept;
}

template <class T>
nlohmann::json lanes(const std::array<T, kLanes>& values) {
  nlohmann::json object = nlohmann::json::object();
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (values[lane] != T{}) object[lane_name(static_cast<Lane>(lane))] = values[lane];
  }
  return object;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& path, uint64_t resumed_step) {
  std::string kept;
  if (resumed_step > 0 && std::filesystem::exists(path)) kept = kept_lines(path, resumed_step);
  file_ = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  write_exact(file_, 0, std::as_bytes(std::span(kept)));
  size_ = kept.size();
}

void MetricsFile::write(const nlohmann::json& object) {
  const std::string line = object.dump() + "\n";
  write_exact(file_, size_, std::as_bytes(std::span(line)));
  size_ += line.size();
}

nlohmann::json lane_object(const std::array<double, kLanes>& values) { return lanes(values); }
nlohmann::json lane_object(const std::array<uint64_t, kLanes>& values) { return lanes(values); }

uint64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) * kKiB;
  }
  return 0;
}

Progress::Progress(uint64_t total_steps, uint32_t logging_steps)
    : total_steps_(total_steps), logging_steps_(logging_steps), terminal_(isatty(STDOUT_FILENO)) {}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', stdout);
  std::fflush(stdout);
}

void Progress::step(const Step& s) {
  if (!terminal_ && s.step % logging_steps_ != 0 && s.step != total_steps_) return;
  std::string line =
      fmt::format("step {}/{}  loss {:.4f}  grad_norm {:.3f}  lr {:.2e}  {:.0f} tokens/s  {}/step",
                  s.step, total_steps_, s.loss, s.grad_norm, s.learning_rate, s.tokens_per_second,
                  format_seconds(s.seconds));
  if (s.light_seconds > 0) {
    line += fmt::format(" ({:.0f} % of light speed)", 100 * s.light_seconds / s.seconds);
  }
  const auto left = static_cast<double>(total_steps_ - s.step);
  line += fmt::format("  eta {}", format_seconds(s.seconds * left));
  if (!terminal_) {
    fmt::print("{}\n", line);
  } else {
    constexpr int kBar = 20;
    const auto filled = static_cast<int>(s.step * kBar / std::max<uint64_t>(1, total_steps_));
    const std::string bar = std::string(filled, '#') + std::string(kBar - filled, '.');
    fmt::print("\r\033[K[{}] {}", bar, line);
    line_open_ = true;
  }
  std::fflush(stdout);
}

void Progress::note(const std::string& text) {
  if (line_open_) std::fputc('\n', stdout);
  line_open_ = false;
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

}  // namespace overspill
