// Swap files on disk: their header, their locks, and the reclaiming of dead runs' files. What a
// former run left in them is never read. Stateless; internal to nvme/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <type_traits>

#include "engine/base/fd.h"

namespace overspill::swap_file {

inline constexpr uint64_t kHeaderBytes = 4096;  // data begin here
inline constexpr std::array<char, 8> kMagic = {'O', 'V', 'S', 'P', 'S', 'W', 'A', 'P'};
inline constexpr uint32_t kVersion = 1;

/// The first page of a swap file, in the host's byte order: only this host ever reads it.
struct SwapHeader {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t file_index = 0;
  uint32_t file_count = 0;
  uint32_t pid = 0;
  uint64_t run_id = 0;
  uint64_t started_unix_s = 0;
  uint64_t stripe_bytes = 0;
  std::array<char, 64> host{};
  std::array<char, kHeaderBytes - 120> unused{};
  uint64_t checksum = 0;  // of all bytes before it
};
static_assert(sizeof(SwapHeader) == kHeaderBytes);
static_assert(std::has_unique_object_representations_v<SwapHeader>);

SwapHeader make_header(uint64_t run_id, uint64_t stripe_bytes, size_t index, size_t count);

/// Takes an open file's lock, unless another open file has it.
bool lock_now(int fd);

/// Holds a directory's lock, so that no other run looks at a swap file between its creation and
/// its locking. File systems that cannot lock directories (NFS) go without.
Fd lock_directory(const std::filesystem::path& directory);

/// Deletes the swap files in a directory that no live run holds.
void reclaim_dead_files(const std::filesystem::path& directory);

}  // namespace overspill::swap_file
