// Blocks in turn to the ranks, a rank's to its threads.
#include "engine/train/file_hashes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <sstream>

#include "engine/base/fd.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kBlock = 64 * kMiB;

struct Block {
  size_t file;
  uint64_t begin, bytes;
};

std::vector<Block> blocks_of(const std::vector<HashedFile>& files) {
  std::vector<Block> blocks;
  for (size_t f = 0; f < files.size(); ++f) {
    for (uint64_t begin = 0; begin < files[f].bytes; begin += kBlock) {
      blocks.push_back({f, begin, std::min(kBlock, files[f].bytes - begin)});
    }
  }
  return blocks;
}

struct FreeState {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

uint64_t block_hash(const fs::path& path, const Block& block) {
  const Fd file = open_file(path, O_RDONLY);
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> buffer(std::min<uint64_t>(kMiB, block.bytes));
  for (uint64_t at = 0; at < block.bytes; at += buffer.size()) {
    const std::span part(buffer.data(), std::min<uint64_t>(buffer.size(), block.bytes - at));
    read_exact(file, block.begin + at, part);
    XXH3_64bits_update(state.get(), part.data(), part.size());
  }
  return XXH3_64bits_digest(state.get());
}

}  // namespace

std::vector<HashedFile> list_files(const fs::path& directory, const Ranks& ranks) {
  std::string list;
  if (ranks.first()) {
    std::vector<std::string> lines;
    for (const auto& entry : fs::directory_iterator(directory)) {
      lines.push_back(fmt::format("{} {}\n", entry.path().filename().string(), entry.file_size()));
    }
    std::ranges::sort(lines);
    for (const std::string& line : lines) list += line;
  }
  std::istringstream stream(ranks.broadcast(list));
  std::vector<HashedFile> files;
  for (HashedFile file; stream >> file.name >> file.bytes;) files.push_back(file);
  return files;
}

void hash_files(const fs::path& directory, std::vector<HashedFile>& files, const Ranks& ranks) {
  const std::vector<Block> blocks = blocks_of(files);
  const size_t each = ceil_div(blocks.size(), ranks.size());
  std::vector<uint64_t> own(each);
  std::mutex mutex;
  std::exception_ptr error;
  parallel_for(each, [&](uint64_t i) {
    const size_t index = i * ranks.size() + ranks.rank();
    if (index >= blocks.size()) return;
    try {
      own[i] = block_hash(directory / files[blocks[index].file].name, blocks[index]);
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
  const std::vector<uint64_t> all = ranks.gather(std::span<const uint64_t>(own));
  std::vector<std::vector<uint64_t>> of_file(files.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    of_file[blocks[i].file].push_back(all[i % ranks.size() * each + i / ranks.size()]);
  }
  for (size_t f = 0; f < files.size(); ++f) {
    files[f].xxh3 = XXH3_64bits(of_file[f].data(), of_file[f].size() * sizeof(uint64_t));
  }
}

std::string hash_text(uint64_t hash) { return fmt::format("{:016x}", hash); }

uint64_t text_hash(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

}  // namespace overspill
