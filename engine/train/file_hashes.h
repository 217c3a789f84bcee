// Checksums of a directory's files, made by all ranks and threads at once: a file's is XXH3 over
// those of its blocks. Every rank makes the same calls and gets the same.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/collective/ranks.h"

namespace overspill {

struct HashedFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t xxh3 = 0;
};

/// Names and sizes of the files that the first rank sees there, in alphabetical order.
std::vector<HashedFile> list_files(const std::filesystem::path& directory, const Ranks& ranks);

/// Fills in the checksums; sizes must be right. Throws Error(io).
void hash_files(const std::filesystem::path& directory, std::vector<HashedFile>& files,
                const Ranks& ranks);

/// 16 hexadecimal digits.
std::string hash_text(uint64_t hash);
uint64_t text_hash(const std::string& text);

}  // namespace overspill
