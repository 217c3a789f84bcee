// Tunes a training file; Ctrl-C ends after the step under way and writes nothing.
#include "bindings/cli/tune_command.h"

#include <fmt/format.h>

#include <optional>

#include "bindings/cli/bench_output.h"
#include "bindings/cli/stop_signal.h"
#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/train/tuner.h"

namespace overspill {
namespace {

constexpr const char* kExamples =
    "\nSimulates thousands of Programs with the rates of the file's offload.hardware_profile\n"
    "(`overspill bench all --profile` measures it), then trains a few steps with the file as it "
    "is\n"
    "and with the best. Nothing of these runs is kept. Results of training do not change, except\n"
    "that other micro-batches add gradients in another order.\n"
    "\nExamples:\n"
    "  overspill tune llama.yaml                       # writes llama-tuned.yaml\n"
    "  overspill tune llama.yaml --runs 0              # the simulator alone, in seconds\n"
    "  overspill tune llama.yaml --runs 12 --html tune.html\n";

/// Its relative paths start where the training file is.
std::filesystem::path output_path(const TuneArguments& arguments) {
  const auto& config = arguments.config;
  if (arguments.output.empty()) {
    return config.parent_path() / (config.stem().string() + "-tuned" + config.extension().string());
  }
  const auto directory = [](const std::filesystem::path& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path)).parent_path();
  };
  if (directory(arguments.output) != directory(config)) {
    fail(ErrorCode::invalid_config,
         "--output {}: relative paths in the file would start elsewhere; name a file in {}",
         arguments.output.string(), directory(config).string());
  }
  return arguments.output;
}

}  // namespace

CLI::App* add_tune_command(CLI::App& app, TuneArguments& arguments) {
  CLI::App* tune = app.add_subcommand(
      "tune", "Search prefetch depth, chunks, slots, queues and update timing for a training file");
  tune->add_option("config", arguments.config, "Training file")->required();
  tune->add_option("--set", arguments.overrides, "Override a key in all trials: --set key=value")
      ->allow_extra_args(false);
  tune->add_option("--runs", arguments.runs, "Short real runs; 0: simulate only (default: 6)")
      ->check(CLI::Range(0, 1000));
  tune->add_option("--steps", arguments.steps, "Measured steps of a run (default: 3)")
      ->check(CLI::Range(1, 1000));
  tune->add_option("--output", arguments.output,
                   "The tuned file (default: the file's name with -tuned)");
  tune->add_option("--json", arguments.json, "Write all trials as JSON");
  tune->add_option("--html", arguments.html, "Write a page with step time over prefetch depth");
  tune->footer(kExamples);
  return tune;
}

int run_tune(const TuneArguments& arguments) {
  const std::filesystem::path output = output_path(arguments);
  check_output(output, "--output");
  check_output(arguments.json, "--json");
  check_output(arguments.html, "--html");
  const std::atomic<bool>& stop = stop_on_signals();
  set_log_level(LogLevel::warning);  // a plan's lines, hundreds of times
  TuneReport report;
  try {
    std::optional<BenchProgressLine> line;
    std::string phase;
    report = tune({arguments.config, arguments.overrides, arguments.runs, arguments.steps},
                  short_runs(arguments.steps, stop), stop,
                  [&](const char* name, size_t done, size_t total, const std::string& text) {
                    if (phase != name) line.emplace(fmt::format("{} ", name));
                    phase = name;
                    line->show(done, total, text);
                  });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::cancelled) throw;
    fmt::print(stderr, "overspill: {}\n", error.what());
    return 130;
  }
  const bool better = !report.winner.settings.empty();
  if (better) {
    write_text_file(output, tuned_yaml(arguments.config, arguments.overrides, report));
  }
  fmt::print("{}", tune_text(report));
  if (better) fmt::print("written        {}\n", output.string());
  if (!arguments.json.empty()) write_text_file(arguments.json, tune_json(report));
  if (!arguments.html.empty()) write_text_file(arguments.html, tune_html(report));
  return 0;
}

}  // namespace overspill
