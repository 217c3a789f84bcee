// Planning a run.
#include "engine/train/run_setup.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

uint64_t third_of_memory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE)) / 3;
}

std::filesystem::path config_path(const TrainConfig& config) {
  return config.base_model_config.empty() ? config.base_model : config.base_model_config;
}

PlanOptions plan_options(const TrainConfig& config, const BatchShape& batch, const Llama& llama) {
  const OffloadConfig& offload = config.offload;
  PlanOptions o;
  o.precision = config.precision;
  o.micro_batches = config.gradient_accumulation_steps;
  o.micro_batch_tokens = batch.tokens();
  o.sequence_len = batch.sequence_len;
  o.compute_scratch_bytes = llama.scratch_bytes();
  o.unified = offload.device == DeviceMode::unified;
  o.device_memory = offload.device_memory.value_or(third_of_memory());
  o.host_memory = offload.host_memory.value_or(third_of_memory());
  o.nvme_capacity = offload.nvme_capacity.value_or(UINT64_MAX);
  o.nvme_available = !offload.nvme_paths.empty();
  o.nvme_files = static_cast<uint32_t>(std::max<size_t>(1, offload.nvme_paths.size()));
  o.nvme_stripe_bytes = offload.io.block_size;
  o.weights = offload.weights;
  o.optimizer = offload.optimizer;
  o.gradients = offload.gradients;
  o.activations = offload.activations;
  o.prefetch_depth = offload.prefetch_depth;
  o.chunk_parameters = offload.chunk_parameters;
  o.update = offload.update;
  return o;
}

}  // namespace

RunSetup::RunSetup(const TrainConfig& c)
    : config(c),
      model(llama_layers(load_model_config(config_path(c)))),
      batch{c.micro_batch_size, c.sequence_len},
      llama(model, weight_type(), batch, host_kernels()),
      layout(plan_layout(model, plan_options(c, batch, llama))) {
  if (c.sequence_len > model.config.max_position_embeddings) {
    log_warning("sequence_len {} is above the model's max_position_embeddings {}", c.sequence_len,
                model.config.max_position_embeddings);
  }
}

std::filesystem::path RunSetup::model_path() const { return config_path(config); }

bool has_byte_tokenizer(const std::filesystem::path& model_path) {
  const auto directory =
      std::filesystem::is_directory(model_path) ? model_path : model_path.parent_path();
  const auto path = directory / "tokenizer_config.json";
  if (!std::filesystem::exists(path)) return false;
  const nlohmann::json json = nlohmann::json::parse(read_text_file(path), nullptr, false);
  return json.is_object() && json.value("tokenizer_class", "") == "ByT5Tokenizer";
}

SequenceData open_sequences(const RunSetup& setup, bool evaluation) {
  std::vector<std::unique_ptr<TokenFile>> files;
  for (const DatasetConfig& dataset : setup.config.datasets) {
    if (dataset.evaluation != evaluation) continue;
    files.push_back(open_token_file({.path = dataset.path,
                                     .format = dataset.type,
                                     .vocab_size = setup.model.config.vocab_size,
                                     .byte_tokenizer = has_byte_tokenizer(setup.model_path())}));
  }
  return SequenceData(std::move(files), {.sequence_len = setup.config.sequence_len,
                                         .shuffle = setup.config.shuffle && !evaluation,
                                         .seed = setup.config.seed});
}

}  // namespace overspill
