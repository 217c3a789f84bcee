// Reading and writing the safetensors format, as its specification demands: header length, JSON,
// dtypes, offsets contiguous from 0 without holes, sizes, duplicates, file length.
// Readers are thread-safe after construction; a writer has one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/base/fd.h"

namespace overspill {

struct TensorSpec {
  std::string name;
  std::vector<uint64_t> shape;
  std::string dtype;  ///< safetensors' spelling: "F32", "BF16", "F16", "I16", ...

  uint64_t elements() const;
  uint64_t bytes() const;
  bool holds_floats() const;  ///< F32, BF16 or F16: what read_floats converts
};

/// A validated safetensors file. Nothing is allocated for tensor contents.
class SafetensorsFile {
 public:
  /// Throws Error(not_found) or Error(invalid_file) naming file, tensor and violation.
  explicit SafetensorsFile(const std::filesystem::path& path);

  struct Entry {
    TensorSpec spec;
    uint64_t file_offset;  ///< absolute
  };
  const Entry* find(const std::string& name) const;
  const std::vector<Entry>& entries() const { return entries_; }  ///< in file order
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return file_.path(); }

  /// Reads elements [begin, begin + count) as stored.
  void read_raw(const Entry& entry, uint64_t begin, std::span<std::byte> out) const;
  /// The same, converted to float32 from F32, BF16 or F16 (other dtypes: Error(invalid_file)).
  void read_floats(const Entry& entry, uint64_t begin, std::span<float> out) const;

 private:
  Fd file_;
  std::vector<Entry> entries_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

/// The tensors of a Hugging Face model directory: model.safetensors, or the shards that
/// model.safetensors.index.json lists (validated: every shard exists, every name is where it says).
/// Also of one safetensors file of any name.
class ModelTensors {
 public:
  explicit ModelTensors(const std::filesystem::path& directory);
  /// Finds a tensor and checks its shape; Error(invalid_file) says what was expected and found,
  /// names the nearest tensor when the name is missing.
  void require(const std::string& name, std::span<const uint64_t> shape) const;
  bool contains(const std::string& name) const;
  void read_floats(const std::string& name, uint64_t begin, std::span<float> out) const;
  std::vector<std::string> names() const;

 private:
  struct Location {
    size_t file;
    const SafetensorsFile::Entry* entry;
  };
  const Location& locate(const std::string& name) const;
  void open_single(const std::filesystem::path& file);
  void open_shards();

  std::filesystem::path directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Location> locations_;
};

/// Several processes may fill one file: one creates it, then the others join.
enum class WriterRole : uint8_t { creates, joins };

/// Writes one file whose tensors are declared first and filled in any order.
class SafetensorsWriter {
 public:
  /// Creates the file at its full size (a full disk is an Error(io) here). Until finish() it has no
  /// header, so that no reader takes it for a model.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata,
                    WriterRole role = WriterRole::creates);
  /// Writes raw bytes at an element offset of tensor `index`.
  void write(size_t index, uint64_t begin, std::span<const std::byte> bytes);
  /// Syncs what this writer has written, and returns its bytes: one count.
  std::vector<uint64_t> flush();
  /// Checks that every byte was written once (the counts of all writers added up), writes the
  /// header, fsyncs and closes. The creator's, after all have flushed.
  void complete(std::span<const uint64_t> written);
  void finish() { complete(flush()); }

 private:
  Fd file_;
  std::string header_;  ///< length and JSON
  std::vector<TensorSpec> tensors_;
  std::vector<uint64_t> offsets_;  ///< absolute
  uint64_t bytes_expected_ = 0;
  uint64_t bytes_written_ = 0;
};

/// A Hugging Face model directory under construction: model.safetensors, or shards of at most
/// `shard_bytes` with model.safetensors.index.json; metadata {"format": "pt"}.
class ModelTensorsWriter {
 public:
  static constexpr uint64_t kShardBytes = 5'000'000'000ull;

  /// Creates the directory if need be, and removes an older index or single file there that would
  /// hide the new one.
  ModelTensorsWriter(const std::filesystem::path& directory, std::vector<TensorSpec> tensors,
                     uint64_t shard_bytes = kShardBytes, WriterRole role = WriterRole::creates);
  /// Writes raw bytes at an element offset of the tensor with this index in `tensors`.
  void write(size_t index, uint64_t begin, std::span<const std::byte> bytes);
  /// As a file's, with a count for each shard.
  std::vector<uint64_t> flush();
  void complete(std::span<const uint64_t> written);
  void finish() { complete(flush()); }

 private:
  std::filesystem::path directory_;
  std::vector<SafetensorsWriter> shards_;
  std::vector<std::pair<size_t, size_t>> places_;  ///< tensor -> (shard, index in shard)
  std::vector<std::string> shard_names_;
  std::vector<TensorSpec> tensors_;
};

}  // namespace overspill
