// `overspill bench`: measures this machine as training uses it, and fills in a hardware profile.
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
  std::string benchmark;  ///< "nvme", "copy", "optimizer", "compute", "collective" or "all"
  bool quick = false;
  double seconds = 0;  ///< per point; 0: the default
  std::filesystem::path json, html, profile;
  std::string memory;                        ///< that measurements in memory cycle through
  std::vector<std::filesystem::path> paths;  ///< of drives
  std::string size, backend = "auto";
  std::vector<std::string> block_sizes;
  std::vector<uint32_t> depths;
  bool verify = false;
  std::vector<std::string> copy_sizes;
  std::vector<uint32_t> hidden_sizes, tokens;
  uint32_t vocabulary = 0;  ///< 0: the default
  uint32_t ranks = 0;       ///< processes to start for collectives; 0: as a launcher says
};

/// Adds `bench` with its sub-subcommands; parsing fills `arguments`, which must outlive `app`.
CLI::App* add_bench_command(CLI::App& app, BenchArguments& arguments);

/// Runs what was parsed; returns the exit code (130 when interrupted).
int run_bench(const BenchArguments& arguments);

}  // namespace overspill
