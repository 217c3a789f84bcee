// Runs the trainer; Ctrl-C and SIGTERM finish the step and save.
#include "bindings/cli/train_command.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "bindings/cli/stop_signal.h"
#include "engine/base/log.h"
#include "engine/collective/launcher.h"
#include "engine/program/dump.h"
#include "engine/program/verify.h"
#include "engine/train/plan_request.h"
#include "engine/train/rank_setup.h"
#include "engine/train/trainer.h"

namespace overspill {
namespace {

void dump(const TrainConfig& config, uint32_t ranks) {
  const ForecastRequest request = forecast_request(config, {.hardware = {}, .ranks = ranks});
  const Forecast forecast = make_forecast(request);
  verify_program(forecast.program, forecast.layout);
  fmt::print("{}{}", dump_layout(forecast.layout), dump_program(forecast.program, forecast.layout));
}

/// Returns whether the run was interrupted.
bool train(const TrainArguments& arguments, const TrainConfig& config, const Ranks& ranks) {
  Trainer trainer(config, ranks);
  const std::atomic<bool>& stop = stop_on_signals();
  const RunReport report = trainer.run(stop);
  if (!ranks.first()) return report.interrupted;
  fmt::print("{}", describe_report(report, trainer.setup()));
  if (report.interrupted) {
    std::string again = arguments.config.string();
    for (const std::string& word : arguments.overrides) again += " --set " + word;
    const bool launched = arguments.ranks > 0 || ranks.identity().launcher == "overspill";
    if (launched) again += fmt::format(" --ranks {}", ranks.size());
    fmt::print("to go on       overspill train {} --set resume_from_checkpoint=true\n", again);
  }
  return report.interrupted;
}

/// This command once a rank.
int start_ranks(const TrainArguments& arguments, const TrainConfig& config,
                const RankIdentity& identity) {
  if (identity.ranks > 1) {
    fail(ErrorCode::invalid_config,
         "--ranks {}: this process is one of {} ranks that {} has started; leave --ranks away, or "
         "start one process without a launcher",
         arguments.ranks, identity.ranks, identity.launcher);
  }
  LaunchOptions launch{
      .ranks = arguments.ranks,
      .command = {"/proc/self/exe", "train", arguments.config.string()},
      .patience = std::chrono::milliseconds(std::llround(config.rank_timeout * 1e3))};
  for (const std::string& word : arguments.overrides) {
    launch.command.insert(launch.command.end(), {"--set", word});
  }
  return launch_ranks(launch);
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  const RankIdentity identity = rank_from_environment();
  const bool launches = arguments.ranks > 0 && arguments.ranks != identity.ranks;
  const uint32_t ranks_meant = launches ? arguments.ranks : identity.ranks;
  // One rank speaks of what all of them read and plan.
  if (launches || identity.rank > 0) set_log_level(LogLevel::warning);
  TrainConfig config = load_train_config(arguments.config, arguments.overrides);
  resolve_batch(config, ranks_meant);
  if (arguments.dump_program) {
    dump(config, ranks_meant);
    return 0;
  }
  if (launches) return start_ranks(arguments, config, identity);
  Ranks ranks(identity, ranks_options(config));
  try {
    const CpuBinding bound = bind_rank(config, ranks);
    return train(arguments, config, ranks) ? 130 : 0;
  } catch (const Error& error) {
    throw ranks.cause(error);
  } catch (const std::exception& error) {
    throw ranks.cause(Error(ErrorCode::internal, error.what()));
  }
}

}  // namespace overspill
