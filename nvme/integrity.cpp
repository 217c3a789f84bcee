// The table of sums, and what a mismatch means. Allocates once, at construction.
#include "nvme/integrity.h"

#include <fmt/format.h>
#include <isa-l/crc.h>

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;  // the caller orders writes and reads

uint64_t pieces(uint64_t bytes) { return ceil_div(bytes, Integrity::kPieceBytes); }

std::span<const std::byte> piece(std::span<const std::byte> bytes, uint64_t index) {
  const uint64_t begin = index * Integrity::kPieceBytes;
  return bytes.subspan(begin, std::min(Integrity::kPieceBytes, bytes.size() - begin));
}

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes) {
  CHECK(bytes.size() <= INT32_MAX);
  // ISA-L does not write through the pointer; its C signature just lacks the const.
  auto* memory = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes.data()));
  return ~crc32_iscsi(memory, static_cast<int>(bytes.size()), 0xffffffffu);
}

uint32_t crc32(std::span<const std::byte> bytes, uint32_t before) {
  return crc32_gzip_refl(before, reinterpret_cast<const unsigned char*>(bytes.data()),
                         bytes.size());
}

uint64_t request_bytes(const Volume& volume, uint64_t block_bytes, uint64_t offset, uint64_t most) {
  return std::min({block_bytes, volume.place(offset).contiguous_bytes, most});
}

Integrity::Integrity(const Volume& volume, uint64_t block_bytes, std::vector<Region> regions,
                     Name name)
    : block_bytes_(block_bytes),
      regions_(std::move(regions)),
      name_(std::move(name)),
      generations_(regions_.size()) {
  uint64_t entries = 0, end = 0;
  for (const Region& region : regions_) {
    CHECK(region.offset >= end && region.bytes > 0 && region.bytes % kIoAlignment == 0);
    end = region.offset + region.bytes;
    first_entry_.push_back(entries);
    for (uint64_t at = region.offset; at < end;) {
      const uint64_t bytes = request_bytes(volume, block_bytes_, at, end - at);
      entries += pieces(bytes);
      at += bytes;
    }
  }
  first_entry_.push_back(entries);
  entries_ = std::vector<Entry>(entries);
}

Integrity::Place Integrity::find(uint64_t offset) const {
  const auto found = std::ranges::lower_bound(regions_, offset, {}, &Region::offset);
  CHECK(found != regions_.end() && found->offset == offset);
  const auto region = static_cast<uint32_t>(found - regions_.begin());
  return {.region = region, .within = 0, .entry = first_entry_[region]};
}

Integrity::Place Integrity::after(const Place& place, uint64_t bytes) const {
  CHECK(bytes <= left(place));
  if (bytes < left(place)) {
    return {place.region, place.within + bytes, place.entry + pieces(bytes)};
  }
  CHECK(place.entry + pieces(bytes) == first_entry_[place.region + 1]);
  return {place.region + 1, 0, first_entry_[place.region + 1]};
}

void Integrity::record(const Place& place, std::span<const std::byte> bytes) {
  if (place.within == 0) generations_[place.region].fetch_add(1, kRelaxed);
  for (uint64_t i = 0; i < pieces(bytes.size()); ++i) {
    Entry& entry = entries_[place.entry + i];
    entry.before.store(entry.now.load(kRelaxed), kRelaxed);
    entry.now.store(crc32c(piece(bytes, i)), kRelaxed);
  }
}

bool Integrity::matches(const Place& place, std::span<const std::byte> bytes) const {
  for (uint64_t i = 0; i < pieces(bytes.size()); ++i) {
    if (entries_[place.entry + i].now.load(kRelaxed) != crc32c(piece(bytes, i))) return false;
  }
  return true;
}

/// The pieces of one request by what they hold.
struct Integrity::Findings {
  std::vector<uint32_t> sums;
  uint64_t first_bad = 0, last_bad = 0;
  uint64_t bad = 0;
  uint64_t stale = 0;                ///< bad ones that hold what was there before the last write
  bool zeros = true;                 ///< all bad pieces hold nothing but zeros
  uint32_t expected = 0, found = 0;  ///< of the first bad piece
};

Integrity::Findings Integrity::examine(const Place& place, std::span<const std::byte> bytes) const {
  Findings f;
  const bool had_before = generations_[place.region].load(kRelaxed) > 1;
  for (uint64_t i = 0; i < pieces(bytes.size()); ++i) {
    const std::span<const std::byte> part = piece(bytes, i);
    const uint32_t sum = crc32c(part), now = entries_[place.entry + i].now.load(kRelaxed);
    f.sums.push_back(sum);
    if (sum == now) continue;
    if (f.bad++ == 0) {
      f.first_bad = i;
      f.expected = now;
      f.found = sum;
    }
    f.last_bad = i;
    f.zeros = f.zeros && std::ranges::all_of(part, [](std::byte b) { return b == std::byte{0}; });
    f.stale += had_before && sum == entries_[place.entry + i].before.load(kRelaxed);
  }
  return f;
}

/// The other page whose content, of its last write or the one before, lies here; empty if none.
std::string Integrity::find_owner(const Place& place, const Findings& findings) const {
  const uint64_t count = findings.last_bad - findings.first_bad + 1;
  const uint64_t own = place.entry + findings.first_bad;
  const auto holds = [&](uint64_t entry, bool before) {
    for (uint64_t i = 0; i < count; ++i) {
      const Entry& e = entries_[entry + i];
      const uint32_t sum = (before ? e.before : e.now).load(kRelaxed);
      if (sum != findings.sums[findings.first_bad + i]) return false;
    }
    return true;
  };
  for (size_t region = 0; region < regions_.size(); ++region) {
    const uint32_t generation = generations_[region].load(kRelaxed);
    if (generation == 0) continue;
    for (uint64_t e = first_entry_[region]; e + count <= first_entry_[region + 1]; ++e) {
      if (e == own) continue;
      const bool now = holds(e, false);
      if (!now && !(generation > 1 && holds(e, true))) continue;
      return fmt::format("{}{}", name_(region), now ? "" : " (before its last write)");
    }
  }
  return "";
}

std::string Integrity::describe(const Place& place, std::span<const std::byte> bytes) const {
  const Findings f = examine(place, bytes);
  if (f.bad == 0) return fmt::format("{}: no mismatch", name(place));
  const uint64_t total = f.sums.size();
  const uint64_t begin = place.within + f.first_bad * kPieceBytes;
  const uint64_t end =
      place.within + std::min<uint64_t>((f.last_bad + 1) * kPieceBytes, bytes.size());
  std::string verdict;
  if (f.stale == total) {
    verdict = "stale: the last write never arrived, what it should have replaced is still there";
  } else if (f.stale > 0 && f.bad - f.stale <= 1) {  // one piece may hold the tear itself
    verdict = "torn: the last write arrived in part, and what it should have replaced remains";
  } else if (f.zeros) {
    verdict = "empty: it holds zeros only, as after a discard or a lost first write";
  } else if (const std::string owner = find_owner(place, f); !owner.empty()) {
    verdict = "misplaced: it holds what was written for " + owner;
  } else {
    verdict = "rotten (or torn inside these bytes): it holds what nobody wrote";
  }
  return fmt::format(
      "bytes {} to {} of {} fail their checksum (CRC32C {:08x} expected, {:08x} found; write {}); "
      "{}",
      begin, end, name(place), f.expected, f.found, generations_[place.region].load(kRelaxed),
      verdict);
}

}  // namespace overspill
