// Parses the command, shows progress on stderr and the table on stdout, and writes the files asked
// for. Ctrl-C and SIGTERM end the benchmark after the transfer under way; its files have no names.
#include "bindings/cli/bench_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "engine/bench/nvme_benchmark.h"
#include "engine/bench/nvme_report.h"
#include "engine/plan/profile_file.h"

namespace overspill {
namespace {

constexpr const char* kExamples =
    "\nWrites a file of --size per path (the names are removed at once, so nothing stays behind),\n"
    "measures every path alone, then all together. A full sweep takes about 2 minutes per path.\n"
    "\nExamples:\n"
    "  overspill bench nvme --path /mnt/nvme0\n"
    "  overspill bench nvme --path /mnt/nvme0 --path /mnt/nvme1 --html drives.html\n"
    "  overspill bench nvme --path /mnt/nvme0 --profile drives.yaml   # then, in a training file:\n"
    "                                       # offload: {hardware_profile: drives.yaml}\n"
    "  overspill bench nvme --path /mnt/nvme0 --quick\n"
    "  overspill bench nvme --path /mnt/nvme0 --block-size 1MiB,2MiB --queue-depth 2,8,32\n";

std::atomic<bool> stop_requested{false};

extern "C" void stop_bench(int signal) {
  stop_requested = true;
  std::signal(signal, SIG_DFL);  // a second one ends the process at once
}

/// A line rewritten in place on a terminal, plain lines otherwise; on stderr.
class BenchProgressLine {
 public:
  ~BenchProgressLine() {
    if (open_) fmt::print(stderr, "\n");
  }
  void show(size_t done, size_t total, const std::string& text) {
    if (!terminal_) {
      fmt::print(stderr, "[{}/{}] {}\n", done, total, text);
      return;
    }
    fmt::print(stderr, "\r\x1b[K[{}/{}{}] {}", done, total, left(done, total), text);
    std::fflush(stderr);
    open_ = true;
  }

 private:
  std::string left(size_t done, size_t total) const {
    if (done == 0) return "";
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
    const auto rest = static_cast<double>(total - done) / static_cast<double>(done);
    return fmt::format(", {} left", format_seconds(passed.count() * rest));
  }

  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool open_ = false;
};

/// Before minutes of measuring: a result that could not be written would be lost.
void check_output(const std::filesystem::path& path, const char* option) {
  if (path.empty()) return;
  const auto parent = std::filesystem::absolute(path).parent_path();
  if (std::filesystem::is_directory(path) || ::access(parent.c_str(), W_OK | X_OK) != 0) {
    fail(ErrorCode::invalid_config, "{} {}: cannot be written; name a file in a directory that can",
         option, path.string());
  }
}

IoBackend parse_backend(const std::string& name) {
  return name == "io_uring"  ? IoBackend::io_uring
         : name == "libaio"  ? IoBackend::libaio
         : name == "threads" ? IoBackend::threads
                             : IoBackend::automatic;
}

NvmeBenchOptions bench_options(const BenchArguments& arguments) {
  NvmeBenchOptions options;
  options.paths = arguments.paths;
  options.backend = parse_backend(arguments.backend);
  options.verify = arguments.verify;
  if (arguments.quick) {
    options.bytes_per_path = kGiB;
    options.seconds_per_point = 0.5;
    options.block_sizes = {kMiB, 4 * kMiB};
    options.depths = {1, 4, 16};
    options.sequential = false;
  }
  if (!arguments.size.empty()) options.bytes_per_path = parse_bytes(arguments.size);
  if (arguments.seconds > 0) options.seconds_per_point = arguments.seconds;
  if (!arguments.depths.empty()) options.depths = arguments.depths;
  if (!arguments.block_sizes.empty()) options.block_sizes.clear();
  for (const std::string& text : arguments.block_sizes) {
    options.block_sizes.push_back(parse_bytes(text));
  }
  return options;
}

void write_outputs(const BenchArguments& arguments, const NvmeBenchReport& report) {
  if (!arguments.json.empty()) write_text_file(arguments.json, bench_json(report));
  if (!arguments.html.empty()) write_text_file(arguments.html, bench_html(report));
  if (arguments.profile.empty()) return;
  HardwareProfile profile;
  profile.drives = to_profile(report);
  save_profile(arguments.profile, profile,
               fmt::format("Measured by `overspill bench nvme` on {}: {}", report.started,
                           report.targets.back().name));
  fmt::print("profile        {} (offload.hardware_profile of a training file)\n",
             arguments.profile.string());
}

}  // namespace

CLI::App* add_bench_command(CLI::App& app, BenchArguments& arguments) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine as training uses it");
  bench->require_subcommand(1);
  CLI::App* nvme = bench->add_subcommand(
      "nvme", "Reads, writes and both at once, and the settings that suit the drives");
  nvme->add_option("--path", arguments.paths, "Directory on a drive; give it once per drive")
      ->required()
      ->allow_extra_args(true);
  nvme->add_option("--size", arguments.size, "Size of the file on each path (default: 4GiB)");
  nvme->add_option("--seconds", arguments.seconds, "Seconds per point (default: 2)")
      ->check(CLI::Range(0.01, 3600.0));
  nvme->add_option("--block-size", arguments.block_sizes,
                   "Request sizes (default: 256KiB,1MiB,4MiB,16MiB)")
      ->delimiter(',')
      ->allow_extra_args(false);
  nvme->add_option("--queue-depth", arguments.depths,
                   "Requests in flight per drive (default: 1,4,16,64)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 1024));
  nvme->add_option("--backend", arguments.backend, "auto, io_uring, libaio or threads")
      ->check(CLI::IsMember({"auto", "io_uring", "libaio", "threads"}));
  nvme->add_flag("--verify", arguments.verify, "With checksums, as training has them by default");
  nvme->add_flag("--quick", arguments.quick, "Few points, 1GiB, half a second each: a first look");
  nvme->add_option("--json", arguments.json, "Write all results as JSON");
  nvme->add_option("--html", arguments.html, "Write a page with plots (one file, works offline)");
  nvme->add_option("--profile", arguments.profile,
                   "Write a hardware profile (YAML) for offload.hardware_profile");
  nvme->footer(kExamples);
  return bench;
}

int run_bench(const BenchArguments& arguments) {
  const NvmeBenchOptions options = bench_options(arguments);
  check_output(arguments.json, "--json");
  check_output(arguments.html, "--html");
  check_output(arguments.profile, "--profile");
  std::signal(SIGINT, stop_bench);
  std::signal(SIGTERM, stop_bench);
  NvmeBenchReport report;
  try {
    BenchProgressLine line;
    report = run_nvme_benchmark(
        options, stop_requested,
        [&](size_t done, size_t total, const std::string& text) { line.show(done, total, text); });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::cancelled) throw;
    fmt::print(stderr, "overspill: {}\n", error.what());
    return 130;
  }
  fmt::print("{}", bench_text(report));
  write_outputs(arguments, report);
  return 0;
}

}  // namespace overspill
