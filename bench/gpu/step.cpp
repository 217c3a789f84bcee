// Trains a few steps as `overspill train` does, and puts what they took beside what the simulator
// says of the same Program with this machine's rates.
#include "bench/gpu/step.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/random.h"
#include "engine/plan/planner.h"
#include "engine/train/trainer.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// The model's shape and random tokens, in a directory that goes with it.
class StepFiles {
 public:
  explicit StepFiles(const StepCase& step) {
    std::string pattern = (fs::temp_directory_path() / "overspill-step-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      fail(ErrorCode::io,
           "{}: cannot be created: {}; set TMPDIR to a directory that can be written", pattern,
           std::strerror(errno));
    }
    directory_ = pattern;
    const ModelConfig c = model_config(step);
    const Json json = {{"architectures", {"LlamaForCausalLM"}},
                       {"model_type", "llama"},
                       {"hidden_act", "silu"},
                       {"hidden_size", c.hidden_size},
                       {"intermediate_size", c.intermediate_size},
                       {"num_hidden_layers", c.num_hidden_layers},
                       {"num_attention_heads", c.num_attention_heads},
                       {"num_key_value_heads", c.num_key_value_heads},
                       {"head_dim", c.head_dim},
                       {"vocab_size", c.vocab_size},
                       {"max_position_embeddings", c.max_position_embeddings},
                       {"rms_norm_eps", c.rms_norm_eps},
                       {"initializer_range", c.initializer_range},
                       {"tie_word_embeddings", false}};
    write_text_file(shape(), json.dump());
    std::vector<uint16_t> values(uint64_t{step.tokens} * step.micro_batches + 1);
    for (uint64_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<uint16_t>(random_below(1, i, step.vocabulary));
    }
    const auto bytes = std::as_bytes(std::span(values));
    write_text_file(tokens(), {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  ~StepFiles() {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  StepFiles(const StepFiles&) = delete;
  StepFiles& operator=(const StepFiles&) = delete;

  fs::path shape() const { return directory_ / "config.json"; }
  fs::path tokens() const { return directory_ / "tokens.bin"; }
  fs::path output() const { return directory_ / "out"; }

 private:
  fs::path directory_;
};

/// Set when so many seconds are over.
class Deadline {
 public:
  explicit Deadline(double seconds)
      : over_(seconds <= 0), thread_([this, seconds](const std::stop_token& done) {
          std::unique_lock lock(mutex_);
          never_.wait_for(lock, done, std::chrono::duration<double>(seconds), [] { return false; });
          over_ = !done.stop_requested();
        }) {}
  const std::atomic<bool>& over() const { return over_; }

 private:
  std::atomic<bool> over_;
  std::mutex mutex_;
  std::condition_variable_any never_;
  std::jthread thread_;
};

TrainConfig train_config(const StepCase& step, const StepPlace& place, const StepFiles& files,
                         const HardwareProfile& profile) {
  TrainConfig config;
  config.init_from_scratch = true;
  config.base_model_config = files.shape();
  config.datasets = {{.path = files.tokens(), .type = TokenFormat::nanogpt}};
  config.sequence_len = step.tokens;
  config.gradient_accumulation_steps = step.micro_batches;
  config.learning_rate = 1e-5;
  config.lr_scheduler = LrScheduler::constant;
  config.output_dir = files.output();
  OffloadConfig& offload = config.offload;
  offload.device = DeviceMode::cuda;
  offload.weights = offload.gradients = Placement::host;
  offload.optimizer = place.drives.empty() ? Placement::host : Placement::nvme;
  offload.nvme_paths = place.drives;
  offload.hardware_profile = profile;
  if (const auto& drives = profile.drives.settings; !place.drives.empty() && drives) {
    offload.io.block_size = drives->block_bytes;
    offload.io.queue_depth = static_cast<uint32_t>(
        place.drives.size() * std::max(drives->read_depth, drives->write_depth));
    offload.io.write_depth = drives->write_depth;
  }
  return config;
}

/// What was measured beside what was predicted.
struct StepResult {
  uint64_t parameters = 0, tokens = 0;
  std::vector<double> seconds;  ///< of each step
  TraceSummary measured;        ///< the step of median time
  StepExpectation expected;
  std::string prediction;  ///< as a run logs it before its first step
};

/// Nothing when time was over before a step could be timed.
std::optional<StepResult> train(const StepCase& step, const StepPlace& place,
                                const HardwareProfile& profile) {
  const Deadline deadline(place.seconds);
  const StepFiles files(step);
  const TrainConfig config = train_config(step, place, files, profile);
  Trainer trainer(config);
  const Layout& layout = trainer.setup().layout;
  const Program steady =
      plan_step(layout, {true, true, /*pending_update=*/true, false, step.micro_batches});
  StepExpectations expectations(layout, profile);
  StepResult result{.parameters = layout.model.parameters(),
                    .tokens = uint64_t{step.tokens} * step.micro_batches,
                    .seconds = {},
                    .measured = {},
                    .expected = *expectations.of(steady),
                    .prediction = describe_prediction(steady, expectations.usual())};
  std::vector<TraceSummary> timed = trainer.time_steps(step.steps, deadline.over());
  if (timed.empty()) return std::nullopt;
  for (const TraceSummary& one : timed) result.seconds.push_back(one.seconds);
  const auto middle = timed.begin() + static_cast<ptrdiff_t>(timed.size() / 2);
  std::ranges::nth_element(timed, middle, {}, &TraceSummary::seconds);
  result.measured = *middle;
  return result;
}

Json lanes_json(const StepResult& result) {
  Json lanes = Json::object();
  const TraceSummary &measured = result.measured, &predicted = result.expected.predicted;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (measured.busy_seconds[lane] == 0 && predicted.busy_seconds[lane] == 0) continue;
    lanes[lane_name(static_cast<Lane>(lane))] = {
        {"bytes", measured.bytes[lane]},
        {"busy_seconds", measured.busy_seconds[lane]},
        {"predicted_busy_seconds", predicted.busy_seconds[lane]},
        {"stall_seconds", measured.stall_seconds[lane]},
        {"predicted_stall_seconds", predicted.stall_seconds[lane]}};
  }
  return lanes;
}

BenchTable step_table(const StepResult& result, const Json& lanes) {
  BenchTable table{.title = "a step whose weights stream, and its prediction",
                   .columns = {"", "GB", "busy s", "predicted s", "measured / predicted"},
                   .rows = {}};
  const auto add = [&](const std::string& name, uint64_t bytes, double measured, double predicted) {
    table.rows.push_back({name, bytes > 0 ? giga(static_cast<double>(bytes)) : "",
                          fmt::format("{:.4f}", measured), fmt::format("{:.4f}", predicted),
                          predicted > 0 ? fmt::format("{:.2f}", measured / predicted) : "-"});
  };
  add("step", 0, result.measured.seconds, result.expected.predicted.seconds);
  for (const auto& [name, lane] : lanes.items()) {
    add(name, lane.at("bytes"), lane.at("busy_seconds"), lane.at("predicted_busy_seconds"));
  }
  return table;
}

Json rates_json(const HardwareProfile& profile) {
  Json rates = Json::object();
  for (const ComputePoint& point : profile.device.compute) {
    rates[fmt::format("{}_flops_per_second", op_name(point.op))] = point.flops_per_second;
  }
  rates["reduce_gradient_elements_per_second"] = profile.device.reduce_gradient;
  rates["export_gradient_elements_per_second"] = profile.device.export_gradient;
  rates["update_parameters_per_second"] = profile.host.updates.at(0).parameters_per_second;
  rates["h2d_bytes_per_second"] = profile.link.h2d;
  rates["d2h_bytes_per_second"] = profile.link.d2h;
  if (profile.drives.settings) {
    rates["drives_read_bytes_per_second"] = profile.drives.read;
    rates["drives_write_bytes_per_second"] = profile.drives.write;
  }
  return rates;
}

BenchSection step_report(const StepResult& result, const StepPlace& place,
                         const HardwareProfile& profile) {
  const Json lanes = lanes_json(result);
  const double seconds = result.measured.seconds, peak = profile.device.peak_flops;
  const double predicted = result.expected.predicted.seconds;
  const double tokens_per_second = static_cast<double>(result.tokens) / seconds;
  const double rate = result.measured.flops / seconds;
  const SpeedOfLight& light = result.expected.light;
  const char* const state = place.drives.empty() ? "host" : "nvme";
  const BenchTable table = step_table(result, lanes);
  const std::string notes[] = {
      fmt::format("{} parameters, optimizer state on {}; {:.0f} tokens/s; {} TFLOP/s with "
                  "recomputation, {:.2f} of the fastest product of matrices",
                  format_count(result.parameters), state, tokens_per_second, tera(rate),
                  rate / peak),
      fmt::format("no schedule could be below {} ({})", format_seconds(light.seconds),
                  light.resource),
      result.prediction};
  return make_section("step", "A streamed step", {&table, 1}, {}, notes,
                      {{"parameters", result.parameters},
                       {"tokens", result.tokens},
                       {"optimizer_state", state},
                       {"all_seconds", result.seconds},
                       {"seconds", seconds},
                       {"predicted_seconds", predicted},
                       {"measured_over_predicted", seconds / predicted},
                       {"light_seconds", light.seconds},
                       {"light_resource", light.resource},
                       {"tokens_per_second", tokens_per_second},
                       {"flops", result.measured.flops},
                       {"share_of_fastest_product", rate / peak},
                       {"lanes", lanes},
                       {"rates", rates_json(profile)}});
}

BenchSection no_step(const std::string& why) {
  const std::string note = "no step: " + why;
  return make_section("step", "A streamed step", {}, {}, {&note, 1}, {{"absence", why}});
}

}  // namespace

BenchSection step_section(const StepCase& step, const StepPlace& place,
                          const BenchProgress& progress, HardwareProfile profile) {
  try {
    if (place.gpu != gpu_of_local_rank(0)) {
      return no_step(
          fmt::format("a run alone computes on GPU {}, and GPU {} is measured; choose it by "
                      "CUDA_VISIBLE_DEVICES instead",
                      gpu_of_local_rank(0), place.gpu));
    }
    measure_step_rates(step, place, progress, profile);
    const std::optional<StepResult> result = train(step, place, profile);
    if (result) return step_report(*result, place, profile);
    return no_step(
        fmt::format("{} were over before one could be timed", format_seconds(place.seconds)));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found && error.code() != ErrorCode::does_not_fit) throw;
    return no_step(error.what());
  }
}

}  // namespace overspill
