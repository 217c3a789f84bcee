// Weights and optimizer state between files and their pages: loading, initialising and exporting,
// a chunk at a time, so that memory stays within the slots. Single-threaded use between steps.
#pragma once

#include <filesystem>

#include "engine/collective/ranks.h"
#include "engine/model/safetensors.h"
#include "engine/run/page_store.h"

namespace overspill {

/// Checks names and shapes of everything the model needs before any page is written; a tied model's
/// lm_head, when stored, is ignored.
void check_model_tensors(const ModelShape& model, const ModelTensors& tensors);

/// Loads masters from F32, BF16 or F16 weights. With precision bf16 the float32 value is kept
/// exactly as weight and remainder.
void load_weights(PageStore& store, const ModelTensors& tensors);

/// Normal(0, initializer_range) for matrices, ones for norms; a pure function of (seed, tensor,
/// element).
void initialize_weights(PageStore& store, uint64_t seed);

// All ranks write at once, each what it owns; returns when all of it is there.

/// Writes the weights as compute uses them (BF16, or F32) to a Hugging Face directory.
void export_weights(PageStore& store, const std::filesystem::path& directory, const Ranks& ranks);

/// optimizer.safetensors: <tensor>.exp_avg, <tensor>.exp_avg_sq (F32) and, with precision bf16,
/// <tensor>.remainder (I16); adafactor: a matrix's <tensor>.exp_avg_sq_row and
/// <tensor>.exp_avg_sq_col. Independent of chunks and placement. With moments_zero, moments are
/// left out.
void save_optimizer(PageStore& store, const std::filesystem::path& file, bool moments_zero,
                    const Ranks& ranks);
/// Finds what is wrong with the file, before anything is loaded.
void check_optimizer(const PageStore& store, const std::filesystem::path& file, bool moments_zero);
void load_optimizer(PageStore& store, const std::filesystem::path& file, bool moments_zero);

}  // namespace overspill
