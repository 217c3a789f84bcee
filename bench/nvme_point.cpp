// Points of the drives, measured on demand: takes commands from stdin and answers each in a line,
//   TOTAL CPU READ WRITE ALL_CPU      bytes per second; CPU seconds per 10^9 bytes, of the threads
//                                     that submit and reap, and of the whole process
// Its files are written once at the start, so that bench/fio_compare can alternate with fio.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "bench/throttled_io.h"
#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/bench/drive_runner.h"
#include "engine/bench/nvme_benchmark.h"

namespace {

using namespace overspill;

constexpr const char* kUsage =
    "usage: bench_nvme_point --path DIR [--path DIR...] [--size 4GiB] [--stripe 1MiB]\n"
    "                        [--pages-per-call 1] [--most-rate BYTES_PER_SECOND_AND_PATH]\n"
    "                        [--verify 1 (with checksums; then all blocks are of --stripe)]\n"
    "then on stdin, depths being per path:\n"
    "  read BLOCK DEPTH | write BLOCK DEPTH | mixed BLOCK READ_DEPTH WRITE_DEPTH\n";

constexpr uint32_t kPages = 4;  // in memory, of each side

struct Arguments {
  std::vector<std::filesystem::path> paths;
  std::map<std::string, uint64_t> values = {{"--size", 4 * kGiB},
                                            {"--stripe", kMiB},
                                            {"--pages-per-call", 1},
                                            {"--most-rate", 0},
                                            {"--verify", 0}};
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc || (name != "--path" && !arguments.values.contains(name))) {
      fail(ErrorCode::invalid_config, "{}: unknown option or no value\n{}", name, kUsage);
    }
    if (name == "--path")
      arguments.paths.emplace_back(argv[i + 1]);
    else
      arguments.values[name] = parse_bytes(argv[i + 1]);
  }
  if (arguments.paths.empty()) fail(ErrorCode::invalid_config, "no --path\n{}", kUsage);
  return arguments;
}

BenchPoint parse_point(const std::string& command) {
  std::istringstream words(command);
  std::string kind, block;
  BenchPoint point{.traffic = Traffic::mixed, .order = PageOrder::random, .block_bytes = 0};
  words >> kind >> block;
  if (kind == "read" || kind == "mixed") words >> point.read_depth;
  if (kind == "write" || kind == "mixed") words >> point.write_depth;
  if (!words || (point.read_depth == 0 && point.write_depth == 0)) {
    fail(ErrorCode::invalid_config, "cannot understand \"{}\"\n{}", command, kUsage);
  }
  point.block_bytes = parse_bytes(block);
  if (kind == "read") point.traffic = Traffic::read;
  if (kind == "write") point.traffic = Traffic::write;
  return point;
}

DriveRunner::Options runner_options(const Arguments& arguments) {
  DriveRunner::Options options{.directories = arguments.paths,
                               .bytes_per_drive = arguments.values.at("--size"),
                               .stripe_bytes = arguments.values.at("--stripe"),
                               .verify = arguments.values.at("--verify") != 0,
                               .pages_per_call = static_cast<uint32_t>(std::min<uint64_t>(
                                   kPages, arguments.values.at("--pages-per-call"))),
                               .io = {}};
  if (const uint64_t most = arguments.values.at("--most-rate"); most > 0) {
    auto limit = std::make_shared<bench::RateLimit>(static_cast<double>(most));
    options.io.wrap = [limit](std::unique_ptr<AsyncIo> inner) {
      return std::make_unique<bench::ThrottledIo>(std::move(inner), limit);
    };
  }
  return options;
}

void serve(const Arguments& arguments) {
  const uint64_t bytes_each = arguments.values.at("--size");
  check_bench_paths(arguments.paths, bytes_each);
  BenchBuffers buffers(bench_page_bytes(bytes_each), kPages);
  DriveRunner runner(runner_options(arguments), buffers);
  const double first = runner.write_first();
  fmt::print("{:.0f} {} {}\n", first, runner.backend(), runner.direct() ? "direct" : "buffered");
  std::fflush(stdout);
  for (std::string command; std::getline(std::cin, command);) {
    const BenchPoint point = parse_point(command);
    // Both at once move half the files' bytes each, so that every command is as much work.
    const uint64_t bytes = point.traffic == Traffic::mixed ? runner.bytes() / 2 : runner.bytes();
    const BenchRates rates = runner.run(point, {.bytes = bytes});
    fmt::print("{:.0f} {:.6f} {:.0f} {:.0f} {:.6f}\n", rates.read + rates.write,
               rates.lane_cpu_seconds_per_gb, rates.read, rates.write, rates.cpu_seconds_per_gb);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    serve(parse(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_nvme_point: {}\n", error.what());
    return 1;
  }
  return 0;
}
