// Prints what a run will be like, without its weights and without its hardware.
#include "bindings/cli/plan_command.h"

#include <fmt/format.h>

#include "bindings/cli/bench_output.h"
#include "engine/base/fd.h"
#include "engine/forecast/forecast_report.h"
#include "engine/plan/profile_file.h"
#include "engine/program/verify.h"
#include "engine/train/plan_request.h"

namespace overspill {
namespace {

constexpr const char* kExamples =
    "\nCONFIG is a training file, or a Hugging Face config.json (then settings come with --set).\n"
    "\nExamples:\n"
    "  overspill plan llama.yaml\n"
    "  overspill plan llama.yaml --hardware this-machine.yaml --html plan.html\n"
    "  overspill plan Llama-3.1-405B/config.json --hardware "
    "profiles/4x-rtx-pro-6000-8-gen5-enterprise.yaml "
    "\\\n"
    "      --set gradient_accumulation_steps=8 --set offload.update=in_backward --set "
    "max_grad_norm=0\n"
    "  overspill plan llama.yaml --trace step.json     # open in https://ui.perfetto.dev\n";

}  // namespace

CLI::App* add_plan_command(CLI::App& app, PlanArguments& arguments) {
  CLI::App* plan = app.add_subcommand(
      "plan", "Say whether a run fits, how fast it will be, and what to change, before it starts");
  plan->add_option("config", arguments.config, "Training file, or a model's config.json")
      ->required();
  plan->add_option("--hardware", arguments.hardware,
                   "Profile of the machine to plan for (default: this one, by the file's "
                   "offload.hardware_profile)");
  plan->add_option("--ranks", arguments.ranks,
                   "Ranks that share the machine (default: the profile's devices)")
      ->check(CLI::Range(1, 4096));
  plan->add_option("--set", arguments.overrides, "Override a key: --set key=value")
      ->allow_extra_args(false);
  plan->add_option("--json", arguments.json, "Write the forecast as JSON");
  plan->add_option("--html", arguments.html, "Write a page with the step's timeline and the tiers");
  plan->add_option("--trace", arguments.trace, "Write the predicted step for Perfetto");
  plan->add_flag("--no-advice", arguments.no_advice, "Do not try other settings");
  plan->footer(kExamples);
  return plan;
}

int run_plan(const PlanArguments& arguments) {
  check_output(arguments.json, "--json");
  check_output(arguments.html, "--html");
  check_output(arguments.trace, "--trace");
  PlanTarget target;
  if (!arguments.hardware.empty()) {
    target.hardware = load_profile(arguments.hardware);
    if (target.hardware->name.empty()) target.hardware->name = arguments.hardware.filename();
  }
  const TrainConfig config =
      load_plan_config(arguments.config, arguments.overrides, target.hardware.has_value());
  target.ranks = arguments.ranks > 0 ? arguments.ranks
                 : target.hardware   ? target.hardware->device.count
                                     : 1;
  const ForecastRequest request = forecast_request(config, target);
  const Forecast forecast = make_forecast(request);
  verify_program(forecast.program, forecast.layout);
  TriedAdvice advice;
  if (!arguments.no_advice) advice = advise(request, forecast);
  fmt::print("{}", forecast_text(request, forecast, advice));
  if (!arguments.json.empty()) {
    write_text_file(arguments.json, forecast_json(request, forecast, advice));
  }
  if (!arguments.html.empty()) {
    write_text_file(arguments.html, forecast_html(request, forecast, advice));
  }
  if (!arguments.trace.empty()) {
    write_trace(arguments.trace, forecast.program, forecast.layout, forecast.trace,
                "overspill plan: a steady step");
  }
  return 0;
}

}  // namespace overspill
