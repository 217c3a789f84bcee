// From a configuration to everything that is decided before memory is allocated: the model's shape,
// the budgets, the layout, the number of steps. `--dump-program` stops here.
#pragma once

#include "engine/model/llama.h"
#include "engine/plan/layout.h"
#include "engine/train/config.h"

namespace overspill {

struct RunSetup {
  TrainConfig config;
  ModelShape model;
  BatchShape batch;
  Llama llama;
  Layout layout;

  explicit RunSetup(const TrainConfig& config);
  DType weight_type() const {
    return config.precision == Precision::bf16 ? DType::bf16 : DType::f32;
  }
  std::filesystem::path model_path() const;
};

/// True when the model directory's tokenizer is the byte tokenizer (ByT5's): text needs no tool.
bool has_byte_tokenizer(const std::filesystem::path& model_path);

/// Opens the training (or evaluation) datasets.
SequenceData open_sequences(const RunSetup& setup, bool evaluation);

}  // namespace overspill
