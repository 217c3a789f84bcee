// Moves segments between memory and a volume: cuts them into requests, keeps the queue full,
// continues short transfers and retries what may pass. One thread per Channel.
// Knows no pages; their checksums and identities are the caller's.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include "engine/base/error.h"
#include "nvme/volume.h"

namespace overspill {
namespace {

constexpr uint32_t kTries = 3;
constexpr uint64_t kLargestBlock = uint64_t{1} << 30;  // below what Linux moves in one call

bool may_pass(int error) { return error == EAGAIN || error == EINTR || error == EIO; }

/// 1 ms after the first failure, then ten times as long each time.
void back_off(uint32_t failures) {
  std::chrono::milliseconds pause{1};
  for (uint32_t i = 1; i < failures; ++i) pause *= 10;
  std::this_thread::sleep_for(pause);
}

std::vector<int> descriptors(const Volume& volume) {
  std::vector<int> files;
  for (const Fd& file : volume.files()) files.push_back(file.get());
  return files;
}

const char* next_step(const IoRequest& request, const IoResult& result) {
  switch (result.error) {
    case 0:
      return result.bytes == 0 && !request.write ? "find what cut the swap file short"
                                                 : "check the drive (dmesg)";
    case ENOSPC:
    case EDQUOT: return "free space there or set offload.nvme_paths to a larger drive";
    case EROFS: return "make the file system writable again (dmesg says why it is not)";
    default: return "check the drive (dmesg)";
  }
}

std::string cause(const IoRequest& request, const IoResult& result) {
  if (result.error != 0) return errno_text(result.error);
  if (result.bytes == 0) return request.write ? "nothing was written" : "end of file";
  return request.write ? "short write" : "short read";
}

}  // namespace

/// One call of transfer: where cutting stands, what is done, and the first failure.
struct Channel::Transfer {
  std::span<const Segment> segments;
  bool write;
  uint64_t total_bytes = 0;
  uint64_t done_bytes = 0;
  size_t next_segment = 0;
  uint64_t next_byte = 0;  // in that segment
  struct Failure {
    Slot slot;
    IoResult result;
  };
  std::optional<Failure> failure;
};

Channel::Channel(const Volume& volume, const IoOptions& options)
    : volume_(volume),
      block_bytes_(options.block_size),
      io_(make_async_io(options, descriptors(volume))) {
  CHECK(block_bytes_ > 0 && block_bytes_ % kIoAlignment == 0 && block_bytes_ <= kLargestBlock);
  const size_t depth = std::min(options.queue_depth, io_->depth());
  slots_.resize(depth);
  free_slots_.reserve(depth);
  batch_.reserve(depth);
  results_.resize(depth);
}

Channel::~Channel() = default;

void Channel::transfer(std::span<const Segment> segments, bool write) {
  Transfer transfer{.segments = segments, .write = write, .failure = std::nullopt};
  for (const Segment& segment : segments) {
    CHECK(segment.offset % kIoAlignment == 0 && segment.bytes % kIoAlignment == 0);
    CHECK(reinterpret_cast<uintptr_t>(segment.memory) % kIoAlignment == 0);
    CHECK(segment.bytes <= volume_.capacity_bytes());
    CHECK(segment.offset <= volume_.capacity_bytes() - segment.bytes);
    transfer.total_bytes += segment.bytes;
  }
  free_slots_.resize(slots_.size());
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0u);

  size_t in_flight = 0;
  batch_.clear();
  for (;;) {
    // After a failure only drain: the kernel may still own buffers.
    if (transfer.failure)
      batch_.clear();
    else
      cut_requests(transfer);
    if (!batch_.empty()) io_->submit(batch_);
    in_flight += batch_.size();
    stats_.requests += batch_.size();
    batch_.clear();
    if (in_flight == 0) break;
    const size_t count = io_->reap(results_);
    CHECK(count > 0 && count <= in_flight);
    in_flight -= count;
    for (const IoResult& result : std::span(results_).first(count)) finish(result, transfer);
  }
  stats_.bytes += transfer.done_bytes;
  if (transfer.failure) fail_transfer(transfer);
  CHECK(transfer.done_bytes == transfer.total_bytes);
}

/// Adds requests to the batch until no slot is free or the segments end.
void Channel::cut_requests(Transfer& transfer) {
  while (!free_slots_.empty() && transfer.next_segment < transfer.segments.size()) {
    const Segment& segment = transfer.segments[transfer.next_segment];
    if (transfer.next_byte == segment.bytes) {
      ++transfer.next_segment;
      transfer.next_byte = 0;
      continue;
    }
    const Volume::Place place = volume_.place(segment.offset + transfer.next_byte);
    const uint64_t bytes =
        std::min({block_bytes_, place.contiguous_bytes, segment.bytes - transfer.next_byte});
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = {.request = {.file = place.file,
                                .offset = place.offset,
                                .memory = segment.memory + transfer.next_byte,
                                .bytes = static_cast<uint32_t>(bytes),
                                .write = transfer.write,
                                .tag = slot},
                    .tries = 0};
    batch_.push_back(slots_[slot].request);
    transfer.next_byte += bytes;
  }
}

/// Takes one completion: frees its slot, or puts what is left of it into the batch again.
void Channel::finish(const IoResult& result, Transfer& transfer) {
  CHECK(result.tag < slots_.size());
  Slot& slot = slots_[result.tag];
  IoRequest& request = slot.request;
  if (result.error == 0) {
    CHECK(result.bytes <= request.bytes);
    // O_DIRECT goes on at a multiple of the alignment; part of a sector is moved again.
    const uint32_t moved = result.bytes / kIoAlignment * kIoAlignment;
    transfer.done_bytes += moved;
    request.offset += moved;
    request.memory += moved;
    request.bytes -= moved;
    if (request.bytes == 0) {
      free_slots_.push_back(static_cast<uint32_t>(result.tag));
      return;
    }
    if (moved > 0) {
      slot.tries = 0;
      batch_.push_back(request);
      return;
    }
  }
  if (transfer.failure) return;
  ++slot.tries;
  const bool retry = result.error == 0 ? result.bytes > 0 : may_pass(result.error);
  if (!retry || slot.tries == kTries) {
    transfer.failure = {.slot = slot, .result = result};
    return;
  }
  back_off(slot.tries);
  ++stats_.retries;
  batch_.push_back(request);
}

void Channel::fail_transfer(const Transfer& transfer) const {
  const auto& [slot, result] = *transfer.failure;
  const IoRequest& request = slot.request;
  fail(ErrorCode::io,
       "{} {} bytes at offset {:#x} of {}: {}{} ({} of {} bytes done); {}, then "
       "resume from the last checkpoint",
       request.write ? "write" : "read", request.bytes, request.offset,
       volume_.files()[request.file].path().string(), cause(request, result),
       slot.tries > 1 ? fmt::format(" after {} tries", slot.tries) : "", transfer.done_bytes,
       transfer.total_bytes, next_step(request, result));
}

}  // namespace overspill
