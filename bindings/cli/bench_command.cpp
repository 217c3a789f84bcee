// Parses the command and runs the benchmarks. Ctrl-C and SIGTERM end them after the measurement
// under way; files on drives have no names, and nothing is written.
#include "bindings/cli/bench_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "bindings/cli/bench_options.h"
#include "bindings/cli/bench_output.h"
#include "bindings/cli/bench_session.h"
#include "bindings/cli/stop_signal.h"
#include "engine/base/error.h"
#include "engine/collective/launcher.h"

namespace overspill {
namespace {

constexpr const char* kNvmeExamples =
    "\nWrites a file of --size per path (the names are removed at once, so nothing stays behind),\n"
    "measures every path alone, then all together. A full sweep takes about 2 minutes per path.\n"
    "\nExamples:\n"
    "  overspill bench nvme --path /mnt/nvme0\n"
    "  overspill bench nvme --path /mnt/nvme0 --path /mnt/nvme1 --html drives.html\n"
    "  overspill bench nvme --path /mnt/nvme0 --profile drives.yaml   # then, in a training file:\n"
    "                                       # offload: {hardware_profile: drives.yaml}\n"
    "  overspill bench nvme --path /mnt/nvme0 --quick\n"
    "  overspill bench nvme --path /mnt/nvme0 --block-size 1MiB,2MiB --queue-depth 2,8,32\n";

constexpr const char* kCollectiveExamples =
    "\nExamples:\n"
    "  overspill bench collective --ranks 4 --profile this-machine.yaml\n"
    "  mpirun -n 8 -x MASTER_ADDR overspill bench collective   # over several hosts\n";

constexpr const char* kAllExamples =
    "\nExamples:\n"
    "  overspill bench all --path /mnt/nvme0 --path /mnt/nvme1 --profile this-machine.yaml\n"
    "  overspill bench all --quick --html this-machine.html\n";

constexpr const char* kProfileHelp =
    "Hardware profile (YAML) to write, or to fill in where it exists: what this does not measure "
    "stays";

void add_drive_options(CLI::App& command, BenchArguments& arguments, bool required) {
  command.add_option("--path", arguments.paths, "Directory on a drive; give it once per drive")
      ->required(required)
      ->allow_extra_args(true);
  command.add_option("--size", arguments.size, "Size of the file on each path (default: 4GiB)");
  command
      .add_option("--block-size", arguments.block_sizes,
                  "Request sizes (default: 256KiB,1MiB,4MiB,16MiB)")
      ->delimiter(',')
      ->allow_extra_args(false);
  command
      .add_option("--queue-depth", arguments.depths,
                  "Requests in flight per drive (default: 1,4,16,64)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 1024));
  command.add_option("--backend", arguments.backend, "auto, io_uring, libaio or threads")
      ->check(CLI::IsMember({"auto", "io_uring", "libaio", "threads"}));
}

void add_copy_options(CLI::App& command, BenchArguments& arguments) {
  command
      .add_option("--copy-size", arguments.copy_sizes,
                  "Sizes of copies (default: 64KiB to 256MiB in steps of four)")
      ->delimiter(',')
      ->allow_extra_args(false);
}

void add_compute_options(CLI::App& command, BenchArguments& arguments) {
  command
      .add_option("--hidden-size", arguments.hidden_sizes,
                  "Hidden sizes, multiples of 256 (default: 256,512,1024,2048)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(256, 65536));
  command
      .add_option("--tokens", arguments.tokens, "Tokens of a micro-batch (default: 64,256,1024)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 1 << 20));
  command.add_option("--vocabulary", arguments.vocabulary, "Of the head (default: 32000)")
      ->check(CLI::Range(16, 1 << 20));
}

void add_memory_option(CLI::App& command, BenchArguments& arguments) {
  command.add_option("--memory", arguments.memory,
                     "Memory that measurements cycle through (default: 512MiB, or twice the "
                     "caches)");
}

void add_common_options(CLI::App& command, BenchArguments& arguments) {
  command.add_option("--seconds", arguments.seconds, "Seconds per point")
      ->check(CLI::Range(0.001, 3600.0));
  command.add_flag("--quick", arguments.quick, "Fewer points and less time each: a first look");
  command.add_option("--json", arguments.json, "Write all results as JSON");
  command.add_option("--html", arguments.html, "Write a page with plots (one file, works offline)");
  command.add_option("--profile", arguments.profile, kProfileHelp);
}

}  // namespace

CLI::App* add_bench_command(CLI::App& app, BenchArguments& arguments) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine as training uses it");
  bench->require_subcommand(1);
  const auto add = [&](const char* name, const char* help) {
    CLI::App* command = bench->add_subcommand(name, help);
    command->parse_complete_callback([&arguments, name] { arguments.benchmark = name; });
    add_common_options(*command, arguments);
    return command;
  };
  CLI::App* nvme =
      add("nvme", "Reads, writes and both at once, and the settings that suit the drives");
  add_drive_options(*nvme, arguments, /*required=*/true);
  nvme->add_flag("--verify", arguments.verify, "With checksums, as training has them by default");
  nvme->footer(kNvmeExamples);
  CLI::App* copy = add("copy", "Copies between host and devices, and the host memory's bandwidth");
  add_copy_options(*copy, arguments);
  CLI::App* optimizer = add("optimizer", "Updates of every rule, and of gradients");
  CLI::App* compute = add("compute", "Forward, backward and loss of Llama layers, by their sizes");
  add_compute_options(*compute, arguments);
  CLI::App* collective = add("collective", "Exchanges between ranks, by size");
  collective->add_option("--ranks", arguments.ranks, "Start so many processes on this host")
      ->check(CLI::Range(1, 4096));
  collective->footer(kCollectiveExamples);
  CLI::App* all = add("all", "All of these, and what they cost each other; drives need --path");
  add_drive_options(*all, arguments, /*required=*/false);
  add_copy_options(*all, arguments);
  add_compute_options(*all, arguments);
  all->footer(kAllExamples);
  for (CLI::App* command : {copy, optimizer, compute, all}) add_memory_option(*command, arguments);
  return bench;
}

namespace {

/// The command's own words, for each of the ranks.
int start_ranks(const BenchArguments& arguments) {
  LaunchOptions launch{.ranks = arguments.ranks, .command = {"/proc/self/exe"}};
  std::vector<std::string>& words = launch.command;
  words.insert(words.end(), {"bench", arguments.benchmark});
  if (arguments.quick) words.push_back("--quick");
  if (arguments.seconds > 0) {
    words.insert(words.end(), {"--seconds", fmt::format("{}", arguments.seconds)});
  }
  const std::pair<const char*, std::filesystem::path> files[] = {
      {"--json", arguments.json}, {"--html", arguments.html}, {"--profile", arguments.profile}};
  for (const auto& [option, path] : files) {
    if (!path.empty()) words.insert(words.end(), {option, path.string()});
  }
  return launch_ranks(launch);
}

/// Of several ranks, the first speaks for all.
void run_collective(const BenchArguments& arguments, const RankIdentity& identity) {
  const std::atomic<bool>& stop = stop_on_signals();
  Ranks ranks(identity, {.zero_stage = 3, .hybrid_shard = 0, .timeout = 60, .config = ""});
  try {
    if (ranks.first()) return BenchSession(arguments, stop, ranks).run();
    run_collective_benchmark(collective_options(arguments), ranks, stop, [](auto&&...) {});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    throw ranks.cause(error);
  }
}

}  // namespace

int run_bench(const BenchArguments& arguments) {
  check_outputs(arguments);
  const bool collective = arguments.benchmark == "collective";
  const RankIdentity identity = collective ? rank_from_environment() : RankIdentity();
  if (arguments.ranks > 0 && arguments.ranks != identity.ranks) {
    if (identity.ranks == 1) return start_ranks(arguments);
    fail(ErrorCode::invalid_config,
         "--ranks {}: this process is one of {} ranks that {} has started; leave --ranks away",
         arguments.ranks, identity.ranks, identity.launcher);
  }
  try {
    if (identity.ranks > 1) {
      run_collective(arguments, identity);
    } else {
      BenchSession(arguments, stop_on_signals(), Ranks()).run();
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::cancelled) throw;
    fmt::print(stderr, "overspill: {}\n", error.what());
    return 130;
  }
  return 0;
}

}  // namespace overspill
