// `overspill tune`.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

namespace overspill {

struct TuneArguments {
  std::filesystem::path config, output, json, html;
  std::vector<std::string> overrides;
  uint32_t runs = 6, steps = 3;
};

CLI::App* add_tune_command(CLI::App& app, TuneArguments& arguments);
int run_tune(const TuneArguments& arguments);

}  // namespace overspill
