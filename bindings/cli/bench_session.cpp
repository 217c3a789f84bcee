// One benchmark after the other.
#include "bindings/cli/bench_session.h"

#include <fmt/format.h>

#include "bindings/cli/bench_options.h"
#include "bindings/cli/bench_output.h"
#include "engine/base/error.h"
#include "engine/bench/bench_profile.h"
#include "engine/bench/nvme_report.h"

namespace overspill {
namespace {

constexpr const char* kNoCollectives =
    "collective: not measured: one rank exchanges nothing; `overspill bench collective --ranks N` "
    "does. The profile keeps what it has";
constexpr const char* kNoDrives =
    "nvme: not measured: no --path names a directory on a drive; the profile keeps what it has";

/// Calls measure(progress) with a line of its own.
template <class Measure>
auto with_progress(const std::string& prefix, const Measure& measure) {
  BenchProgressLine line(prefix);
  const BenchProgress progress = [&](size_t done, size_t total, const std::string& text) {
    line.show(done, total, text);
  };
  return measure(progress);
}

BenchSection left_out(const char* name, const char* heading, const char* why) {
  return {.name = name,
          .heading = heading,
          .text = fmt::format("{}\n", why),
          .html = html_note(why),
          .json = {{"measured", false}}};
}

}  // namespace

BenchSession::BenchSession(const BenchArguments& arguments, const std::atomic<bool>& stop,
                           const Ranks& ranks)
    : arguments_(arguments),
      stop_(stop),
      ranks_(ranks),
      machine_(read_machine()),
      host_(describe_bench_host(machine_)),
      profile_(load_or_new_profile(arguments.profile)) {}

void BenchSession::add(BenchSection section) {
  fmt::print("{}{}", sections_.empty() ? "" : "\n", section.text);
  std::fflush(stdout);
  sections_.push_back(std::move(section));
}

void BenchSession::sign(const std::string& benchmark) {
  const bool drives = benchmark == "nvme";
  sign_profile(benchmark, host_, machine_,
               drives ? std::span(arguments_.paths) : std::span<const std::filesystem::path>(),
               profile_);
}

void BenchSession::run_nvme(bool verify) {
  NvmeBenchOptions options = nvme_options(arguments_);
  options.verify = verify;
  const NvmeBenchReport report = with_progress("", [&](const BenchProgress& progress) {
    return run_nvme_benchmark(options, stop_, progress);
  });
  nvme_json_ = bench_json(report);
  nvme_html_ = bench_html(report);
  profile_.drives = to_profile(report);
  add({.name = "nvme",
       .heading = "Drives",
       .text = bench_text(report),
       .html = bench_html_body(report),
       .json = nlohmann::ordered_json::parse(nvme_json_)});
  sign("nvme");
}

void BenchSession::run_one(const std::string& benchmark) {
  if (benchmark == "nvme") return run_nvme(arguments_.verify);
  if (benchmark == "collective" && ranks_.size() == 1) {
    return add(left_out("collective", "Collectives", kNoCollectives));
  }
  add(with_progress(benchmark + ": ", [&](const BenchProgress& progress) {
    if (benchmark == "copy") {
      const auto report = run_copy_benchmark(copy_options(arguments_, machine_), stop_, progress);
      fill_profile(report, profile_);
      return copy_section(report);
    }
    if (benchmark == "optimizer") {
      const auto report =
          run_optimizer_benchmark(optimizer_options(arguments_, machine_), stop_, progress);
      fill_profile(report, profile_);
      return optimizer_section(report);
    }
    if (benchmark == "collective") {
      const auto report =
          run_collective_benchmark(collective_options(arguments_), ranks_, stop_, progress);
      fill_profile(report, profile_);
      return collective_section(report);
    }
    CHECK(benchmark == "compute");
    const auto report =
        run_compute_benchmark(compute_options(arguments_, machine_), stop_, progress);
    fill_profile(report, profile_);
    return compute_section(report);
  }));
  sign(benchmark);
}

void BenchSession::run_all() {
  if (arguments_.paths.empty()) {
    add(left_out("nvme", "Drives", kNoDrives));
  } else {
    run_nvme(/*verify=*/true);  // as training has it by default
  }
  for (const char* one : {"copy", "optimizer", "compute", "collective"}) run_one(one);
  run_contention();
  fmt::print("\n{}", table_text(profile_summary(profile_)));
}

void BenchSession::run_contention() {
  const auto drives = arguments_.paths.empty() ? std::nullopt : profile_.drives.settings;
  const ContentionBenchOptions options = contention_options(arguments_, machine_, drives);
  add(with_progress("contention: ", [&](const BenchProgress& progress) {
    return contention_section(run_contention_benchmark(options, stop_, progress));
  }));
}

void BenchSession::run() {
  const std::string& benchmark = arguments_.benchmark;
  benchmark == "all" ? run_all() : run_one(benchmark);
  const bool drives_only = benchmark == "nvme";
  write_outputs(arguments_, drives_only ? nvme_json_ : sections_json(host_, sections_),
                drives_only ? nvme_html_ : sections_html(host_, sections_), profile_,
                fmt::format("Last measured by `overspill bench {}` at {} on {}.", benchmark,
                            host_.started, host_.machine));
}

}  // namespace overspill
