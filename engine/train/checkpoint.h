// Checkpoints on disk: checkpoint-<step>/ with the HF model, the optimizer state, the position in
// the data, and a manifest with the size and XXH3 of every file. Written under a temporary name,
// flushed, renamed; `latest` is a link to a complete one only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "engine/collective/ranks.h"
#include "engine/run/page_store.h"

namespace overspill {

/// What a resumed run continues from, beside the pages.
struct TrainingPosition {
  uint64_t step = 0;     ///< steps completed
  uint64_t updates = 0;  ///< optimizer updates applied (t of AdamW)
  uint64_t cursor = 0;   ///< sequences consumed
  uint64_t tokens = 0;
  uint64_t seed = 0;  ///< of the data order
  bool shuffle = false;
  uint32_t sequence_len = 0;
};

struct CheckpointOptions {
  std::filesystem::path output_dir;
  /// Where the tokenizer's files are copied from; may be empty.
  std::filesystem::path source_model;
  uint32_t total_limit = 0;  ///< keep this many, 0: all
  bool only_model = false;
  std::string user_state{};  ///< kept for whoever resumes
};

/// All ranks write output_dir/checkpoint-<step>; returns its path. A failure leaves no partial
/// checkpoint under a final name and the last complete one untouched.
std::filesystem::path save_checkpoint(PageStore& store, const TrainingPosition& position,
                                      const CheckpointOptions& options, const Ranks& ranks);

/// A checkpoint whose manifest and files have been verified.
struct Checkpoint {
  std::filesystem::path directory;
  TrainingPosition position;
  std::string precision;
  std::string user_state{};
};
/// Verifies sizes and checksums, each rank those of some files. Error(invalid_file) names the file
/// and what to do.
Checkpoint open_checkpoint(const std::filesystem::path& directory, const Ranks& ranks = Ranks());
/// The checkpoint that output_dir/latest names; where there is no link the one of the highest step,
/// if any.
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& output_dir);
/// Fills all pages from the checkpoint.
void load_checkpoint(PageStore& store, const Checkpoint& checkpoint);

/// True when output_dir holds any checkpoint-<step>.
bool has_checkpoints(const std::filesystem::path& output_dir);

/// Removes what an interrupted save left under temporary names.
void remove_partial_checkpoints(const std::filesystem::path& output_dir);

const char* precision_name(Precision precision);

}  // namespace overspill
