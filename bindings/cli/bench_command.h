// `overspill bench nvme`: measures drives as training uses them and recommends settings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace overspill {

struct BenchArguments {
  std::vector<std::filesystem::path> paths;
  std::string size, backend = "auto";
  double seconds = 0;  ///< 0: the default
  std::vector<std::string> block_sizes;
  std::vector<uint32_t> depths;
  bool quick = false, verify = false;
  std::filesystem::path json, html, profile;
};

/// Adds `bench` with its sub-subcommands; parsing fills `arguments`, which must outlive `app`.
CLI::App* add_bench_command(CLI::App& app, BenchArguments& arguments);

/// Runs what was parsed; returns the exit code (130 when interrupted).
int run_bench(const BenchArguments& arguments);

}  // namespace overspill
