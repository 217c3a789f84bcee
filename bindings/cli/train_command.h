// `overspill train`: a configuration file, its overrides, and the run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace overspill {

struct TrainArguments {
  std::filesystem::path config;
  std::vector<std::string> overrides;  ///< key=value
  bool dump_program = false;
  uint32_t ranks = 0;  ///< processes to start on this host; 0: this one, as its launcher says
};

/// Returns the process's exit code: 0, or 130 when interrupted. Throws Error.
int run_train(const TrainArguments& arguments);

}  // namespace overspill
