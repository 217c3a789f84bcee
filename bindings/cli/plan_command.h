// `overspill plan`.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

namespace overspill {

struct PlanArguments {
  std::filesystem::path config, hardware, json, html, trace;
  std::vector<std::string> overrides;
  uint32_t ranks = 0;
  bool no_advice = false;
};

CLI::App* add_plan_command(CLI::App& app, PlanArguments& arguments);
int run_plan(const PlanArguments& arguments);

}  // namespace overspill
