// Writes safetensors files and Hugging Face model directories.
// One thread at a time. A file gets its header last, after its contents are on disk, and a
// directory its index after its shards: an interrupted export is refused by every reader.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/safetensors.h"

namespace overspill {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr uint64_t kHeaderLengthBytes = 8;
constexpr uint64_t kHeaderAlignment = 8;

/// Header length and JSON, keys in the order given.
std::string make_header(std::span<const TensorSpec> tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::set<std::string> names;
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + json(metadata).dump();
  uint64_t offset = 0;
  for (const TensorSpec& spec : tensors) {
    CHECK(spec.name != "__metadata__" && names.insert(spec.name).second);
    if (text.size() > 1) text += ',';
    const uint64_t end = offset + spec.bytes();
    text +=
        fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                    json(spec.name).dump(), spec.dtype, fmt::join(spec.shape, ","), offset, end);
    offset = end;
  }
  text += '}';
  text.resize(round_up(text.size(), kHeaderAlignment), ' ');
  const uint64_t length = text.size();
  std::string header(kHeaderLengthBytes, '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  return header + text;
}

[[noreturn]] void fail_to_reserve(const fs::path& path, uint64_t size_bytes, int error) {
  fail(ErrorCode::io,
       "create {}: {} bytes ({}) needed: {}; free space there or choose another output directory",
       path.string(), size_bytes, format_bytes(size_bytes), errno_text(error));
}

/// Reserves the whole file now rather than failing after most of it is written.
void reserve_space(const Fd& file, uint64_t size_bytes) {
  // Ask first: some file systems fill up before fallocate notices that the space is too small.
  struct statvfs volume {};
  if (::fstatvfs(file.get(), &volume) == 0 && volume.f_blocks > 0 &&
      size_bytes / volume.f_frsize > volume.f_bavail) {
    fail_to_reserve(file.path(), size_bytes, ENOSPC);
  }
  const auto length = static_cast<off_t>(size_bytes);
  int result = 0;
  do {
    result = ::fallocate(file.get(), 0, 0, length);
  } while (result != 0 && errno == EINTR);
  // Network file systems often cannot reserve; a file of the right length is what is left.
  if (result != 0 && errno == EOPNOTSUPP) result = ::ftruncate(file.get(), length);
  if (result != 0) fail_to_reserve(file.path(), size_bytes, errno);
}

constexpr const char* kShareOutput =
    "where ranks are on several hosts, output_dir must be on a file system that they share";

/// A file that another process has created.
Fd join_file(const fs::path& path, uint64_t size_bytes) {
  Fd file;
  try {
    file = open_file(path, O_RDWR);
  } catch (const Error& error) {
    fail(error.code(), "{}; the first rank has created it: {}", error.what(), kShareOutput);
  }
  if (file_size(file) == size_bytes) return file;
  fail(ErrorCode::io, "{}: {} bytes, but the first rank has created it with {}: {}", path.string(),
       file_size(file), size_bytes, kShareOutput);
}

void remove_stale(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
  if (error) fail(ErrorCode::io, "remove {}: {}", path.string(), error.message());
}

void prepare_directory(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) {
    fail(ErrorCode::io, "create directory {}: {}; choose another output directory",
         directory.string(), error.message());
  }
  remove_stale(directory / "model.safetensors");
  remove_stale(directory / "model.safetensors.index.json");
}

/// Tensors per shard, filled greedily in order; a tensor above the limit has a shard of its own.
std::vector<std::vector<TensorSpec>> assign_shards(std::span<const TensorSpec> tensors,
                                                   uint64_t shard_bytes,
                                                   std::vector<std::pair<size_t, size_t>>& places) {
  std::vector<std::vector<TensorSpec>> shards(1);
  uint64_t filled = 0;
  for (const TensorSpec& spec : tensors) {
    const uint64_t size_bytes = spec.bytes();
    if (!shards.back().empty() && size_bytes > shard_bytes - std::min(shard_bytes, filled)) {
      shards.emplace_back();
      filled = 0;
    }
    places.emplace_back(shards.size() - 1, shards.back().size());
    shards.back().push_back(spec);
    filled += size_bytes;
  }
  return shards;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     WriterRole role)
    : header_(make_header(tensors, metadata)), tensors_(std::move(tensors)) {
  uint64_t end = header_.size();
  for (const TensorSpec& spec : tensors_) {
    offsets_.push_back(end);
    end += spec.bytes();
  }
  bytes_expected_ = end - header_.size();
  if (role == WriterRole::joins) {
    file_ = join_file(path, end);
    return;
  }
  file_ = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  try {
    reserve_space(file_, end);
  } catch (const Error&) {
    ::unlink(path.c_str());
    throw;
  }
}

void SafetensorsWriter::write(size_t index, uint64_t begin, std::span<const std::byte> bytes) {
  CHECK(index < tensors_.size());
  const TensorSpec& spec = tensors_[index];
  const uint64_t size_bytes = spec.bytes(), elements = spec.elements();
  const uint64_t unit = elements == 0 ? 1 : size_bytes / elements;
  CHECK(begin <= elements && bytes.size() <= (elements - begin) * unit);
  CHECK(bytes.size() % unit == 0);
  write_exact(file_, offsets_[index] + begin * unit, bytes);
  bytes_written_ += bytes.size();
}

std::vector<uint64_t> SafetensorsWriter::flush() {
  CHECK(file_.valid());
  sync_file(file_);
  return {bytes_written_};
}

void SafetensorsWriter::complete(std::span<const uint64_t> written) {
  CHECK(written.size() == 1 && written[0] == bytes_expected_);
  // Behind the contents, which are on disk: a header promises them.
  write_exact(file_, 0, std::as_bytes(std::span(header_)));
  sync_file(file_);
  file_.reset();
}

ModelTensorsWriter::ModelTensorsWriter(const fs::path& directory, std::vector<TensorSpec> tensors,
                                       uint64_t shard_bytes, WriterRole role)
    : directory_(directory), tensors_(std::move(tensors)) {
  if (role == WriterRole::creates) prepare_directory(directory_);
  const auto shards = assign_shards(tensors_, shard_bytes, places_);
  for (size_t i = 0; i < shards.size(); ++i) {
    shard_names_.push_back(
        shards.size() == 1 ? "model.safetensors"
                           : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
    shards_.emplace_back(directory_ / shard_names_.back(), shards[i],
                         std::map<std::string, std::string>{{"format", "pt"}}, role);
  }
}

void ModelTensorsWriter::write(size_t index, uint64_t begin, std::span<const std::byte> bytes) {
  CHECK(index < places_.size());
  const auto [shard, place] = places_[index];
  shards_[shard].write(place, begin, bytes);
}

std::vector<uint64_t> ModelTensorsWriter::flush() {
  std::vector<uint64_t> written;
  for (SafetensorsWriter& shard : shards_) written.push_back(shard.flush()[0]);
  return written;
}

void ModelTensorsWriter::complete(std::span<const uint64_t> written) {
  for (size_t i = 0; i < shards_.size(); ++i) shards_[i].complete(written.subspan(i, 1));
  if (shards_.size() > 1) {
    json weight_map = json::object();
    uint64_t total_bytes = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      weight_map[tensors_[i].name] = shard_names_[places_[i].first];
      total_bytes += tensors_[i].bytes();
    }
    const json index = {{"metadata", {{"total_size", total_bytes}}},
                        {"weight_map", std::move(weight_map)}};
    write_text_file(directory_ / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  sync_directory(directory_);
}

}  // namespace overspill
