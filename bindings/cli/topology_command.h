// `overspill topology`: this machine or a saved one as a tree, and where ranks would be placed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace CLI {
class App;
}

namespace overspill {

struct TopologyArguments {
  std::filesystem::path load, save;
  uint32_t ranks = 0;  ///< 0: no placement
  std::vector<std::filesystem::path> paths;
  bool json = false;
};

/// Adds `topology`; parsing fills `arguments`, which must outlive `app`.
CLI::App* add_topology_command(CLI::App& app, TopologyArguments& arguments);

/// Runs what was parsed; returns the exit code.
int run_topology(const TopologyArguments& arguments);

}  // namespace overspill
