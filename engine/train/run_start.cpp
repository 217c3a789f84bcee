// Finds and checks what a run starts from.
#include "engine/train/run_start.h"

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/train/model_state.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

/// A resumed run must see the sequences that the interrupted one had left.
void require_same_data_order(const TrainingPosition& position, const TrainConfig& config,
                             const fs::path& checkpoint) {
  if (position.seed == config.seed && position.shuffle == config.shuffle &&
      position.sequence_len == config.sequence_len) {
    return;
  }
  fail(ErrorCode::invalid_config,
       "{}: its data order (seed {}, shuffle {}, sequence_len {}) is not this run's (seed {}, "
       "shuffle {}, sequence_len {}); set them to the checkpoint's, or start from it as base_model",
       checkpoint.string(), position.seed, position.shuffle, position.sequence_len, config.seed,
       config.shuffle, config.sequence_len);
}

/// The first rank's choice: another host may see a new link late.
std::optional<fs::path> shared_latest(const fs::path& output_dir, const Ranks& ranks) {
  std::string name;
  if (ranks.first()) {
    const std::optional<fs::path> latest = latest_checkpoint(output_dir);
    if (latest) name = latest->filename();
  }
  name = ranks.broadcast(name);
  return name.empty() ? std::nullopt : std::optional(output_dir / name);
}

}  // namespace

RunStart find_start(const RunSetup& setup, const Ranks& ranks) {
  const TrainConfig& config = setup.config;
  RunStart start;
  std::optional<fs::path> from;
  if (config.resume_from_checkpoint == "true") {
    from = shared_latest(config.output_dir, ranks);
    if (!from) log_info("no checkpoint in {} yet: starting anew", config.output_dir.string());
  } else if (!config.resume_from_checkpoint.empty()) {
    from = config.resume_from_checkpoint;
  }
  if (from) {
    start.checkpoint = open_checkpoint(*from, ranks);
    require_same_data_order(start.checkpoint->position, config, *from);
    check_model_tensors(setup.model, ModelTensors(start.checkpoint->directory));
    return start;
  }
  if (has_checkpoints(config.output_dir)) {
    fail(ErrorCode::invalid_config,
         "output_dir {} holds checkpoints of an earlier run; continue it with "
         "resume_from_checkpoint: true, or choose another output_dir",
         config.output_dir.string());
  }
  if (!config.init_from_scratch) {
    start.model.emplace(config.base_model);
    check_model_tensors(setup.model, *start.model);
  }
  return start;
}

}  // namespace overspill
