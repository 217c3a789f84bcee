// The `overspill` command. Errors end as one line on stderr: exit code 1, 2 for usage and
// configuration.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include "bindings/cli/bench_command.h"
#include "bindings/cli/info_command.h"
#include "bindings/cli/plan_command.h"
#include "bindings/cli/topology_command.h"
#include "bindings/cli/train_command.h"
#include "bindings/cli/tune_command.h"
#include "engine/base/error.h"
#include "engine/base/version.h"
#include "engine/train/config.h"

namespace {

constexpr const char* kTrainExamples =
    "\nExamples:\n"
    "  overspill train llama.yaml\n"
    "  overspill train llama.yaml --set max_steps=10 --set offload.host_memory=8GiB\n"
    "  overspill train llama.yaml --set resume_from_checkpoint=true\n"
    "  overspill train llama.yaml --deepspeed ds_config.json\n"
    "  overspill train llama.yaml --dump-program | less\n"
    "\nSeveral ranks (GPUs, or processes on CPUs), here and with other launchers:\n"
    "  overspill train llama.yaml --ranks 4 --set zero_stage=3\n"
    "  torchrun --nproc-per-node 4 --no-python overspill train llama.yaml\n"
    "  mpirun -n 4 overspill train llama.yaml\n"
    "  srun -n 4 overspill train llama.yaml\n";

int run(int argc, char** argv) {
  CLI::App app{
      "Train models whose state does not fit: weights, gradients, optimizer states and "
      "activations paged between device memory, host memory and NVMe.",
      "overspill"};
  app.set_version_flag("--version", std::string("overspill ") + overspill::kVersion);
  app.require_subcommand(1);
  app.footer(
      "\nExamples:\n  overspill info\n  overspill bench nvme --path /mnt/nvme0\n"
      "  overspill train llama.yaml\n");

  overspill::TrainArguments train;
  bool help_keys = false;
  CLI::App* train_command = app.add_subcommand("train", "Fine-tune a Hugging Face checkpoint");
  train_command->add_option("config", train.config, "Configuration file (YAML)");
  train_command->add_option("--set", train.overrides, "Override a key: --set key=value")
      ->allow_extra_args(false);
  const auto add_deepspeed = [&](const std::string& file) {
    train.overrides.push_back(fmt::format("deepspeed={:?}", file));
  };
  train_command->add_option_function<std::string>(
      "--deepspeed", add_deepspeed, "DeepSpeed configuration (JSON), as --set deepspeed=FILE");
  train_command->add_flag("--dump-program", train.dump_program,
                          "Print the layout and a step's Program instead of training");
  train_command->add_option("--ranks", train.ranks, "Train with so many processes on this host")
      ->check(CLI::Range(1u, 4096u));
  train_command->add_flag("--help-keys", help_keys, "List every key of the configuration file");
  train_command->footer(kTrainExamples);

  bool json = false;
  CLI::App* info_command = app.add_subcommand("info", "Show this machine as the engine sees it");
  info_command->add_flag("--json", json, "Print one JSON object");

  overspill::TopologyArguments topology;
  CLI::App* topology_command = overspill::add_topology_command(app, topology);

  overspill::BenchArguments bench;
  CLI::App* bench_command = overspill::add_bench_command(app, bench);

  overspill::PlanArguments plan;
  CLI::App* plan_command = overspill::add_plan_command(app, plan);

  overspill::TuneArguments tune;
  CLI::App* tune_command = overspill::add_tune_command(app, tune);

  try {
    app.parse(argc, argv);
    if (train_command->parsed() && !help_keys && train.config.empty()) {
      throw CLI::RequiredError("config");
    }
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  }
  if (help_keys) {
    fmt::print("{}", overspill::describe_train_keys());
    return 0;
  }
  if (train_command->parsed()) return overspill::run_train(train);
  if (topology_command->parsed()) return overspill::run_topology(topology);
  if (bench_command->parsed()) return overspill::run_bench(bench);
  if (plan_command->parsed()) return overspill::run_plan(plan);
  if (tune_command->parsed()) return overspill::run_tune(tune);
  overspill::run_info(json);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const overspill::Error& error) {
    std::fflush(stdout);
    fmt::print(stderr, "overspill: {}: {}\n", overspill::error_code_name(error.code()),
               error.what());
    return error.code() == overspill::ErrorCode::invalid_config ? 2 : 1;
  } catch (const std::filesystem::filesystem_error& error) {
    std::fflush(stdout);
    fmt::print(stderr, "overspill: io: {}\n", error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "overspill: internal: {}\n", error.what());
    return 1;
  }
}
