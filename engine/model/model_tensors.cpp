// The tensors of a Hugging Face model directory, whether one file or indexed shards.
// Every file is opened and checked at construction, so that a run does not find a missing shard
// after an hour. Thread-safe after construction.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/safetensors.h"
#include "engine/model/strict_json.h"

namespace overspill {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kDownloadAgain = "download the model's index and shards again";

bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string shape_text(std::span<const uint64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

[[noreturn]] void fail_without_tensors(const fs::path& directory) {
  std::error_code ignored;
  const std::string where = directory.string();
  if (!fs::is_directory(directory, ignored)) {
    fail(ErrorCode::not_found, "{}: {}; give a Hugging Face model directory", where,
         path_exists(directory) ? "not a directory" : "no such directory");
  }
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (!path_exists(directory / name)) continue;
    fail(ErrorCode::not_found,
         "{}: holds {} but no {}; convert it: load it with transformers' "
         "AutoModelForCausalLM.from_pretrained and save it with save_pretrained",
         where, name, kSingleFile);
  }
  fail(ErrorCode::not_found,
       "{}: neither {} nor {} is there; give a Hugging Face model directory, or download the "
       "model again",
       where, kSingleFile, kIndexFile);
}

/// A shard must lie in the directory itself: an index comes from a download.
bool is_plain_name(const std::string& name) {
  const bool control =
      std::any_of(name.begin(), name.end(), [](unsigned char byte) { return byte < 0x20; });
  return !name.empty() && name != "." && name != ".." && !control &&
         name.find('/') == std::string::npos;
}

/// Tensor name -> shard name, with only the types and the shard names checked.
std::map<std::string, std::string> read_weight_map(const fs::path& path) {
  const std::string where = path.string();
  const json root = parse_strict_json(read_text_file(path), where, kDownloadAgain);
  const auto found = root.is_object() ? root.find("weight_map") : root.end();
  if (found == root.end() || !found->is_object() || found->empty()) {
    fail(ErrorCode::invalid_file,
         "{}: weight_map is missing, empty or not an object, expected tensor names with their "
         "shards; {}",
         where, kDownloadAgain);
  }
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, shard] : found->items()) {
    if (!shard.is_string() || !is_plain_name(shard.get<std::string>())) {
      fail(ErrorCode::invalid_file,
           "{}: tensor \"{}\": shard is {}, expected the plain name of a file in the same "
           "directory; {}",
           where, name, brief_json(shard), kDownloadAgain);
    }
    weight_map[name] = shard.get<std::string>();
  }
  return weight_map;
}

/// Names every missing shard at once, so that one download repairs them all.
void check_shards_exist(const fs::path& directory, const std::set<std::string>& shards) {
  std::vector<std::string> missing;
  for (const std::string& shard : shards) {
    if (!path_exists(directory / shard)) missing.push_back(shard);
  }
  if (missing.empty()) return;
  fail(ErrorCode::not_found, "{}: {} of {} shards are missing: {}; download them",
       (directory / kIndexFile).string(), missing.size(), shards.size(), fmt::join(missing, ", "));
}

}  // namespace

ModelTensors::ModelTensors(const fs::path& directory) : directory_(directory) {
  if (fs::is_regular_file(directory)) {
    open_single(directory);
  } else if (path_exists(directory / kSingleFile)) {
    open_single(directory / kSingleFile);
  } else if (path_exists(directory / kIndexFile)) {
    open_shards();
  } else {
    fail_without_tensors(directory);
  }
}

void ModelTensors::open_single(const fs::path& file) {
  files_.emplace_back(file);
  for (const auto& entry : files_.front().entries()) {
    locations_[entry.spec.name] = {.file = 0, .entry = &entry};
  }
}

void ModelTensors::open_shards() {
  const auto weight_map = read_weight_map(directory_ / kIndexFile);
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) shards.insert(shard);
  check_shards_exist(directory_, shards);
  std::map<std::string, size_t> positions;
  for (const std::string& shard : shards) {
    positions[shard] = files_.size();
    files_.emplace_back(directory_ / shard);
  }
  for (const auto& [name, shard] : weight_map) {
    const size_t position = positions.at(shard);
    const auto* entry = files_[position].find(name);
    if (entry == nullptr) {
      fail(ErrorCode::invalid_file,
           "{}: tensor \"{}\" should be in {}, but that file does not hold it; {}",
           (directory_ / kIndexFile).string(), name, shard, kDownloadAgain);
    }
    locations_[name] = {.file = position, .entry = entry};
  }
}

const ModelTensors::Location& ModelTensors::locate(const std::string& name) const {
  const auto found = locations_.find(name);
  if (found != locations_.end()) return found->second;
  const std::string nearest = nearest_name(name, names());
  fail(ErrorCode::invalid_file,
       "{}: no tensor \"{}\" among its {}{}; check that config.json and "
       "the tensors are of the same model",
       directory_.string(), name, locations_.size(),
       nearest.empty() ? "" : fmt::format(" (the nearest name is \"{}\")", nearest));
}

void ModelTensors::require(const std::string& name, std::span<const uint64_t> shape) const {
  const Location& location = locate(name);
  const TensorSpec& spec = location.entry->spec;
  const std::string where =
      fmt::format("{}: tensor \"{}\"", files_[location.file].path().string(), name);
  if (!std::equal(shape.begin(), shape.end(), spec.shape.begin(), spec.shape.end())) {
    fail(ErrorCode::invalid_file,
         "{}: shape is {}, expected {}; check that config.json and the tensors are of the same "
         "model",
         where, shape_text(spec.shape), shape_text(shape));
  }
  if (!spec.holds_floats()) {
    fail(ErrorCode::invalid_file,
         "{}: dtype is {}, expected F32, BF16 or F16; convert the model to one of them", where,
         spec.dtype);
  }
}

bool ModelTensors::contains(const std::string& name) const { return locations_.contains(name); }

void ModelTensors::read_floats(const std::string& name, uint64_t begin,
                               std::span<float> out) const {
  const Location& location = locate(name);
  files_[location.file].read_floats(*location.entry, begin, out);
}

std::vector<std::string> ModelTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, location] : locations_) names.push_back(name);
  return names;
}

}  // namespace overspill
