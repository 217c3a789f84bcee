// Saving, verifying and loading checkpoints.
#include "engine/train/checkpoint.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/model/model_config.h"
#include "engine/train/file_hashes.h"
#include "engine/train/model_state.h"
#include "engine/train/rank_setup.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

constexpr int kFormatVersion = 2;  // 2: checksums over blocks
constexpr const char* kManifest = "overspill.json";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",     "tokenizer_config.json",
                                           "tokenizer.model",    "special_tokens_map.json",
                                           "added_tokens.json",  "vocab.json",
                                           "merges.txt",         "generation_config.json",
                                           "chat_template.jinja"};

/// The directory a model path names (the path itself, or a config.json's parent).
fs::path model_directory(const fs::path& path) {
  return fs::is_directory(path) ? path : path.parent_path();
}

void write_config(const ModelConfig& config, Precision precision, const fs::path& directory) {
  nlohmann::json json = config.source;
  const char* key = json.contains("dtype") ? "dtype" : "torch_dtype";
  json[key] = precision == Precision::bf16 ? "bfloat16" : "float32";
  write_text_file(directory / "config.json", json.dump(2) + "\n");
}

void copy_tokenizer(const fs::path& source, const fs::path& directory) {
  for (const char* name : kTokenizerFiles) {
    const fs::path from = source / name;
    if (fs::exists(from)) write_text_file(directory / name, read_text_file(from));
  }
}

/// Of a manifest without its own checksum.
uint64_t manifest_hash(const nlohmann::json& manifest) { return text_hash(manifest.dump()); }

void write_manifest(const fs::path& directory, const TrainingPosition& p, Precision precision,
                    const std::string& user_state, const std::vector<HashedFile>& hashed) {
  nlohmann::json files = nlohmann::json::object();
  for (const HashedFile& file : hashed) {
    files[file.name] = {{"bytes", file.bytes}, {"xxh3", hash_text(file.xxh3)}};
  }
  nlohmann::json manifest = {{"format", kFormatVersion},
                             {"step", p.step},
                             {"updates", p.updates},
                             {"data_cursor", p.cursor},
                             {"tokens", p.tokens},
                             {"seed", p.seed},
                             {"shuffle", p.shuffle},
                             {"sequence_len", p.sequence_len},
                             {"precision", precision_name(precision)},
                             {"files", files}};
  if (!user_state.empty()) manifest["user_state"] = user_state;
  manifest["xxh3"] = hash_text(manifest_hash(manifest));
  write_text_file(directory / kManifest, manifest.dump(2) + "\n");
}

void point_latest(const fs::path& output_dir, const std::string& name) {
  const fs::path link = output_dir / "latest", temporary = output_dir / ".latest.tmp";
  fs::remove(temporary);
  fs::create_symlink(name, temporary);
  rename_durably(temporary, link);
}

std::optional<uint64_t> checkpoint_step(const fs::path& path) {
  const std::string name = path.filename().string();
  constexpr std::string_view kPrefix = "checkpoint-";
  if (!name.starts_with(kPrefix) || name.size() == kPrefix.size() || name.size() > 30) return {};
  uint64_t step = 0;
  for (const char c : name.substr(kPrefix.size())) {
    if (c < '0' || c > '9') return {};
    step = step * 10 + static_cast<uint64_t>(c - '0');
  }
  return step;
}

/// Of the highest step. A run that has ended before it named its first checkpoint leaves one.
std::optional<fs::path> unnamed_checkpoint(const fs::path& output_dir) {
  std::optional<fs::path> found;
  std::error_code none_yet;
  for (const auto& entry : fs::directory_iterator(output_dir, none_yet)) {
    const auto step = checkpoint_step(entry.path());
    if (!step || !fs::exists(entry.path() / kManifest)) continue;
    if (!found || *step > *checkpoint_step(*found)) found = entry.path();
  }
  return found;
}

/// Puts a complete checkpoint in its place. An older one of the same step, which `latest` may name,
/// is there until the very moment the new one is.
void move_into_place(const fs::path& temporary, const fs::path& target) {
  if (fs::exists(target) &&
      renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    sync_directory(target.parent_path());
    fs::remove_all(temporary);
    return;
  }
  fs::remove_all(target);  // a file system that cannot exchange
  rename_durably(temporary, target);
}

/// Keeps `limit` checkpoints: the one just saved, even where an abandoned run left later steps, and
/// those of the highest steps.
void remove_oldest(const fs::path& saved, uint32_t limit) {
  std::vector<std::pair<uint64_t, fs::path>> others;
  for (const auto& entry : fs::directory_iterator(saved.parent_path())) {
    const auto step = checkpoint_step(entry.path());
    if (step && entry.path() != saved) others.emplace_back(*step, entry.path());
  }
  std::sort(others.begin(), others.end());
  for (size_t i = 0; i + limit - 1 < others.size(); ++i) fs::remove_all(others[i].second);
}

/// Compares every file with its size and checksum in the manifest.
void check_files(const fs::path& directory, const nlohmann::json& listed, const Ranks& ranks) {
  const auto remedy = "the checkpoint is damaged; resume from another one";
  std::vector<HashedFile> files;
  for (const auto& [name, expected] : listed.items()) {
    const fs::path path = directory / name;
    files.push_back({.name = name, .bytes = expected.at("bytes")});
    if (!fs::exists(path)) {
      fail(ErrorCode::invalid_file, "{}: listed in {} but missing; {}", path.string(), kManifest,
           remedy);
    }
    if (fs::file_size(path) != files.back().bytes) {
      fail(ErrorCode::invalid_file, "{}: {} bytes, {} says {}; {}", path.string(),
           fs::file_size(path), kManifest, files.back().bytes, remedy);
    }
  }
  hash_files(directory, files, ranks);
  for (const HashedFile& file : files) {
    if (hash_text(file.xxh3) == listed.at(file.name).at("xxh3").get<std::string>()) continue;
    fail(ErrorCode::invalid_file, "{}: its content does not match the checksum in {}; {}",
         (directory / file.name).string(), kManifest, remedy);
  }
}

}  // namespace

const char* precision_name(Precision precision) {
  return precision == Precision::bf16 ? "bf16" : "float32";
}

/// All ranks fill the directory; the first one writes what is not sharded.
void fill_checkpoint(PageStore& store, const fs::path& directory, const TrainingPosition& position,
                     const CheckpointOptions& options, const Ranks& ranks) {
  const Layout& layout = store.layout();
  if (ranks.first()) {
    fs::remove_all(directory);
    fs::create_directories(directory);
  }
  export_weights(store, directory, ranks);
  if (!options.only_model) {
    save_optimizer(store, directory / kOptimizer, position.updates == 0, ranks);
  }
  if (ranks.first() && !layout.model.config.source.is_null()) {
    write_config(layout.model.config, layout.options.precision, directory);
  }
  if (ranks.first() && !options.source_model.empty()) {
    copy_tokenizer(model_directory(options.source_model), directory);
  }
  if (options.only_model) return;
  std::vector<HashedFile> files = list_files(directory, ranks);
  hash_files(directory, files, ranks);
  if (!ranks.first()) return;
  write_manifest(directory, position, layout.options.precision, options.user_state, files);
}

fs::path save_checkpoint(PageStore& store, const TrainingPosition& position,
                         const CheckpointOptions& options, const Ranks& ranks) {
  const std::string name = fmt::format("checkpoint-{}", position.step);
  const fs::path temporary = options.output_dir / fmt::format(".{}.tmp", name);
  const fs::path target = options.output_dir / name;
  const auto give_up = [&] {
    std::error_code ignored;
    if (ranks.first()) fs::remove_all(temporary, ignored);
  };
  try {
    fill_checkpoint(store, temporary, position, options, ranks);
    if (ranks.first()) {
      sync_directory(temporary);
      move_into_place(temporary, target);
      if (!options.only_model) point_latest(options.output_dir, name);
      if (options.total_limit > 0) remove_oldest(target, options.total_limit);
    }
    ranks.world().barrier();
  } catch (const fs::filesystem_error& error) {
    give_up();
    fail(ErrorCode::io, "save {}: {}; free space there or change output_dir, then resume",
         target.string(), error.what());
  } catch (const Error& error) {
    give_up();
    throw Error(error.code(), fmt::format("save {}: {}; earlier checkpoints are untouched",
                                          target.string(), error.what()));
  }
  return target;
}

Checkpoint open_checkpoint(const fs::path& directory, const Ranks& ranks) {
  const fs::path manifest_path = directory / kManifest;
  if (!fs::exists(manifest_path)) {
    fail(ErrorCode::not_found,
         "{}: no {} there, so it is no checkpoint to resume from (save_only_model writes none); "
         "name a "
         "checkpoint-<step> directory, or use it as base_model",
         directory.string(), kManifest);
  }
  nlohmann::json manifest;
  Checkpoint checkpoint{fs::canonical(directory), {}, {}, {}};
  try {
    manifest = nlohmann::json::parse(read_text_file(manifest_path));
    if (manifest.at("format") != kFormatVersion) {
      fail(ErrorCode::invalid_file, "{}: format {} is not the {} this version reads",
           manifest_path.string(), manifest.at("format").dump(), kFormatVersion);
    }
    const std::string own = manifest.at("xxh3").get<std::string>();
    manifest.erase("xxh3");
    if (hash_text(manifest_hash(manifest)) != own) {
      fail(ErrorCode::invalid_file,
           "{}: its content does not match its checksum; the checkpoint is damaged; resume from "
           "another one",
           manifest_path.string());
    }
    TrainingPosition& p = checkpoint.position;
    manifest.at("step").get_to(p.step);
    manifest.at("updates").get_to(p.updates);
    manifest.at("data_cursor").get_to(p.cursor);
    manifest.at("tokens").get_to(p.tokens);
    manifest.at("seed").get_to(p.seed);
    manifest.at("shuffle").get_to(p.shuffle);
    manifest.at("sequence_len").get_to(p.sequence_len);
    manifest.at("precision").get_to(checkpoint.precision);
    checkpoint.user_state = manifest.value("user_state", "");
    require_alike({{"checkpoint", manifest_hash(manifest)}}, ranks);
    check_files(directory, manifest.at("files"), ranks);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorCode::invalid_file, "{}: {}; the checkpoint is damaged; resume from another one",
         manifest_path.string(), error.what());
  }
  return checkpoint;
}

std::optional<fs::path> latest_checkpoint(const fs::path& output_dir) {
  const fs::path link = output_dir / "latest";
  if (!fs::exists(fs::symlink_status(link))) return unnamed_checkpoint(output_dir);
  if (!fs::exists(link)) {
    // Starting over in silence would throw the trained steps away.
    fail(ErrorCode::not_found,
         "{}: names {}, which is not there; set resume_from_checkpoint to another checkpoint, or "
         "remove the link to start from the base model",
         link.string(), fs::is_symlink(link) ? fs::read_symlink(link).string() : "nothing");
  }
  return fs::canonical(link);
}

void load_checkpoint(PageStore& store, const Checkpoint& checkpoint) {
  const char* precision = precision_name(store.layout().options.precision);
  if (checkpoint.precision != precision) {
    fail(ErrorCode::invalid_config,
         "{} was written with precision: {}; this run has precision: {}; set it to the same, or "
         "start "
         "from it as base_model",
         checkpoint.directory.string(), checkpoint.precision, precision);
  }
  const bool moments_zero = checkpoint.position.updates == 0;
  check_optimizer(store, checkpoint.directory / kOptimizer, moments_zero);
  load_weights(store, ModelTensors(checkpoint.directory));
  load_optimizer(store, checkpoint.directory / kOptimizer, moments_zero);
}

bool has_checkpoints(const fs::path& output_dir) {
  std::error_code error;
  if (!fs::is_directory(output_dir, error)) return false;  // making it says what is wrong
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    if (checkpoint_step(entry.path())) return true;
  }
  return false;
}

void remove_partial_checkpoints(const fs::path& output_dir) {
  if (!fs::exists(output_dir)) return;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(".checkpoint-") || !name.ends_with(".tmp")) continue;
    log_info("removing {}: a save that was interrupted", entry.path().string());
    fs::remove_all(entry.path());
  }
}

}  // namespace overspill
