// Moves segments between memory and a volume: cuts them into requests, keeps the queue full,
// continues short transfers, retries what may pass, and checks content. One thread per Channel.
// Knows no pages: an Integrity names them.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "nvme/channel_errors.h"
#include "nvme/transfer.h"

namespace overspill {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kTries = 3;
constexpr uint64_t kLargestBlock = uint64_t{1} << 30;  // below what Linux moves in one call
/// Summing takes about as long as moving, so a request is handed over before the next is summed.
constexpr uint64_t kSubmitBytes = 256 << 10;
constexpr milliseconds kDrain{10000};  // what cancelled requests get to come back

/// 1 ms after the first failure, then ten times as long each time.
void back_off(uint32_t failures) {
  milliseconds pause{1};
  for (uint32_t i = 1; i < failures; ++i) pause *= 10;
  std::this_thread::sleep_for(pause);
}

std::vector<int> descriptors(const Volume& volume) {
  std::vector<int> files;
  for (const Fd& file : volume.files()) files.push_back(file.get());
  return files;
}

}  // namespace

Channel::Channel(const Volume& volume, const IoOptions& options, Integrity* integrity)
    : volume_(volume),
      block_bytes_(options.block_size),
      timeout_(options.timeout.count() > 0 ? options.timeout : kForever),
      integrity_(integrity),
      io_(make_async_io(options, descriptors(volume))),
      write_depth_(std::max(options.write_depth, 1u)),
      file_in_flight_(volume.files().size()) {
  CHECK(block_bytes_ > 0 && block_bytes_ % kIoAlignment == 0 && block_bytes_ <= kLargestBlock);
  CHECK(integrity_ == nullptr || integrity_->block_bytes() == block_bytes_);
  depth_ = std::min(options.queue_depth, io_->depth());
  const size_t slots = integrity_ == nullptr ? depth_ : 2 * size_t{depth_};
  slots_.resize(slots);
  free_slots_.resize(slots);
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0u);
  finished_.reserve(slots);
  batch_.reserve(slots);
  results_.resize(depth_);
  transfers_.resize(kMostStarted);
}

Channel::~Channel() {
  io_.reset();  // waits
  free_held_slots();
}

void Channel::transfer(std::span<const Segment> segments, bool write) {
  CHECK(started_ == 0);
  start(segments, write);
  finish();
}

void Channel::start(std::span<const Segment> segments, bool write) {
  CHECK(started_ < kMostStarted);
  Transfer& transfer = under_way(started_++);
  static const Transfer kFresh{};  // copied: g++ 12 takes a moved temporary for uninitialised
  transfer = kFresh;
  transfer.segments = segments;
  transfer.write = write;
  for (const Segment& segment : segments) {
    CHECK(segment.offset % kIoAlignment == 0 && segment.bytes % kIoAlignment == 0);
    CHECK(reinterpret_cast<uintptr_t>(segment.memory) % kIoAlignment == 0);
    CHECK(segment.bytes <= volume_.capacity_bytes());
    CHECK(segment.offset <= volume_.capacity_bytes() - segment.bytes);
    transfer.total_bytes += segment.bytes;
  }
  fill_queue();
}

void Channel::finish() {
  CHECK(started_ > 0);
  Transfer& transfer = under_way(0);
  const milliseconds wait =
      timeout_ == kForever ? kForever : std::max(timeout_ / 8, milliseconds(1));
  Clock::time_point checked = Clock::now();
  for (;;) {
    fill_queue();
    check_finished();  // while the drive works on what was just submitted
    // After a failure only drain: the kernel may still own buffers.
    if (transfer.failure ? in_flight_ == 0 : transfer.all_cut() && transfer.held == 0) break;
    if (in_flight_ == 0) continue;
    io_->wait_for(worth_waking_for(transfer));
    const size_t count = io_->reap(results_, wait);
    CHECK(count <= in_flight_);
    in_flight_ -= static_cast<uint32_t>(count);
    for (const IoResult& result : std::span(results_).first(count)) take_result(result);
    if (timeout_ == kForever || Clock::now() - checked < wait) continue;
    checked = Clock::now();
    look_for_stuck();
  }
  stats_.bytes += transfer.done_bytes;
  if (transfer.failure) {
    // What was started after it has been drained as well, and is given up.
    free_held_slots();
    finished_.clear();
    started_ = 0;
    drain_until_ = Clock::time_point::max();
    fail_transfer(transfer);
  }
  CHECK(transfer.done_bytes == transfer.total_bytes);
  oldest_ = (oldest_ + 1) % kMostStarted;
  --started_;
}

Channel::Transfer& Channel::under_way(uint32_t index) {
  return transfers_[(oldest_ + index) % kMostStarted];
}

/// Cuts and submits until the queue is full: of a transfer only what the ones before it leave room
/// for, and nothing after a failure.
void Channel::fill_queue() {
  for (uint32_t i = 0; i < started_; ++i) {
    Transfer& transfer = under_way(i);
    if (!transfer.failure) add_requests(transfer);
    if (transfer.failure) {
      std::erase_if(batch_, [&](const IoRequest& request) {
        return i == 0 || slots_[request.tag].transfer == &transfer;
      });
    }
    if (transfer.failure || !transfer.all_cut()) break;
  }
  submit_batch();
}

/// With everything submitted and nothing to sum, the end of the transfer is what counts.
uint32_t Channel::worth_waking_for(const Transfer& transfer) {
  const bool all_cut = under_way(started_ - 1).all_cut();
  const bool sums = integrity_ != nullptr && !transfer.write;
  if (!all_cut || sums || transfer.failure || !batch_.empty()) return 1;
  return std::min(transfer.held, in_flight_);
}

/// Adds requests to the batch until the queue is full or the segments end.
void Channel::add_requests(Transfer& transfer) {
  while (!free_slots_.empty() && in_flight_ + batch_.size() < depth_ && !transfer.all_cut()) {
    const Segment& segment = transfer.segments[transfer.next_segment];
    if (transfer.next_byte == segment.bytes) {
      CHECK(integrity_ == nullptr || transfer.place.within == 0);  // whole regions
      ++transfer.next_segment;
      transfer.next_byte = 0;
      continue;
    }
    if (integrity_ != nullptr && transfer.next_byte == 0) {
      transfer.place = integrity_->find(segment.offset);
    }
    const Volume::Place place = volume_.place(segment.offset + transfer.next_byte);
    if (!has_room(place.file, transfer.write)) return;
    cut_request(transfer, place);
    if (transfer.failure) return;
  }
}

/// A drive shares its time by what is queued: a full queue of writes would starve the few reads
/// that the next layer waits for, so writers hold back while there are any.
bool Channel::has_room(uint32_t file, bool write) const {
  return !write || file_in_flight_[file] < write_depth_ ||
         volume_.reads_in_flight(file).load(std::memory_order_relaxed) == 0;
}

void Channel::cut_request(Transfer& transfer, const Volume::Place& place) {
  const Segment& segment = transfer.segments[transfer.next_segment];
  const uint64_t offset = segment.offset + transfer.next_byte;
  uint64_t most = segment.bytes - transfer.next_byte;
  if (integrity_ != nullptr) most = std::min(most, integrity_->left(transfer.place));
  const uint64_t bytes = request_bytes(volume_, block_bytes_, offset, most);
  const uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[index];
  slot = {.request = {.file = place.file,
                      .offset = place.offset,
                      .memory = segment.memory + transfer.next_byte,
                      .bytes = static_cast<uint32_t>(bytes),
                      .write = transfer.write,
                      .tag = index},
          .transfer = &transfer,
          .bytes = static_cast<uint32_t>(bytes),
          .place = transfer.place,
          .held = true,
          .start = {}};
  transfer.next_byte += bytes;
  ++transfer.held;
  ++file_in_flight_[place.file];
  if (!transfer.write) volume_.reads_in_flight(place.file).fetch_add(1, std::memory_order_relaxed);
  if (integrity_ != nullptr) {
    transfer.place = integrity_->after(slot.place, bytes);
    if (!transfer.write && !integrity_->written(slot.place)) {
      transfer.failure = {.kind = Failure::Kind::never_written, .slot = slot};
      return free_slot(slot);
    }
    if (transfer.write) integrity_->record(slot.place, whole(slot));
  }
  batch_.push_back(slot.request);
  transfer.batch_bytes += bytes;
  if (integrity_ != nullptr && transfer.write && transfer.batch_bytes >= kSubmitBytes) {
    submit_batch();
    transfer.batch_bytes = 0;
  }
}

/// Submits what the queue has room for; requests that are read again wait for it.
void Channel::submit_batch() {
  const size_t count = std::min<size_t>(batch_.size(), depth_ - in_flight_);
  if (count == 0) return;
  const std::span<const IoRequest> requests = std::span(batch_).first(count);
  const Clock::time_point now = Clock::now();
  for (const IoRequest& request : requests) {
    slots_[request.tag].submitted = true;
    slots_[request.tag].start = now;
  }
  io_->submit(requests);
  in_flight_ += static_cast<uint32_t>(count);
  stats_.requests += count;
  batch_.erase(batch_.begin(), batch_.begin() + static_cast<ptrdiff_t>(count));
}

/// Takes one completion: frees its slot, or puts what is left of it into the batch again.
void Channel::take_result(const IoResult& result) {
  CHECK(result.tag < slots_.size());
  Slot& slot = slots_[result.tag];
  Transfer& transfer = *slot.transfer;
  CHECK(slot.submitted);
  slot.submitted = false;
  if (result.error == 0) {
    CHECK(result.bytes <= slot.request.bytes);
    // O_DIRECT goes on at a multiple of the alignment; part of a sector is moved again.
    const auto moved = static_cast<uint32_t>(result.bytes / kIoAlignment * kIoAlignment);
    take_moved_bytes(moved, slot);
    if (moved > 0) return;
  }
  if (transfer.failure) return;
  ++slot.tries;
  const bool retry = result.error == 0 ? result.bytes > 0 : may_pass(result.error);
  if (!retry || slot.tries == kTries) {
    transfer.failure = {.kind = Failure::Kind::result, .slot = slot, .result = result};
    return;
  }
  back_off(slot.tries);
  ++stats_.retries;
  batch_.push_back(slot.request);
}

/// Goes on with the rest of a request, or ends it.
void Channel::take_moved_bytes(uint32_t bytes, Slot& slot) {
  Transfer& transfer = *slot.transfer;
  IoRequest& request = slot.request;
  transfer.done_bytes += bytes;
  request.offset += bytes;
  request.memory += bytes;
  request.bytes -= bytes;
  if (bytes > 0) slot.tries = 0;
  if (request.bytes == 0) {
    if (integrity_ == nullptr || request.write) return free_slot(slot);
    finished_.push_back(static_cast<uint32_t>(request.tag));
  } else if (bytes > 0 && !transfer.failure) {
    batch_.push_back(request);
  }
}

void Channel::check_finished() {
  for (const uint32_t index : finished_) {
    if (!slots_[index].transfer->failure) check_content(slots_[index]);
  }
  finished_.clear();
}

/// Ends a finished read, or has it read again.
void Channel::check_content(Slot& slot) {
  if (integrity_->matches(slot.place, whole(slot))) {
    if (slot.reread) {
      log_warning(
          "read {} bytes at offset {:#x} of {} twice: the first bytes failed their checksum, the "
          "second did not; watch the drive and its link (dmesg, smartctl -a)",
          slot.bytes, slot.request.offset - slot.bytes,
          volume_.files()[slot.request.file].path().string());
    }
    return free_slot(slot);
  }
  Transfer& transfer = *slot.transfer;
  transfer.done_bytes -= slot.bytes;
  IoRequest& request = slot.request;
  if (slot.reread) {
    transfer.failure = {.kind = Failure::Kind::content,
                        .slot = slot,
                        .text = integrity_->describe(slot.place, whole(slot))};
    return;
  }
  request.offset -= slot.bytes;
  request.memory -= slot.bytes;
  request.bytes = slot.bytes;
  slot.reread = true;
  ++stats_.rereads;
  batch_.push_back(request);
}

std::span<std::byte> Channel::whole(const Slot& slot) const {
  return {slot.request.memory + slot.request.bytes - slot.bytes, slot.bytes};
}

void Channel::free_slot(Slot& slot) {
  const IoRequest& request = slot.request;
  slot.held = false;
  --slot.transfer->held;
  --file_in_flight_[request.file];
  if (!request.write) {
    volume_.reads_in_flight(request.file).fetch_sub(1, std::memory_order_relaxed);
  }
  free_slots_.push_back(static_cast<uint32_t>(slot.request.tag));
}

void Channel::free_held_slots() {
  for (Slot& slot : slots_) {
    if (slot.held) free_slot(slot);
  }
}

/// Cancels everything when the oldest request is too old; ends the process when that fails.
void Channel::look_for_stuck() {
  const Clock::time_point now = Clock::now();
  if (drain_until_ != Clock::time_point::max()) {
    if (now > drain_until_ && in_flight_ > 0) end_process(under_way(0));
    return;
  }
  const Slot* oldest = nullptr;
  for (const Slot& slot : slots_) {
    if (slot.submitted && (oldest == nullptr || slot.start < oldest->start)) oldest = &slot;
  }
  if (oldest == nullptr || now - oldest->start < timeout_) return;
  const auto age = std::chrono::duration_cast<milliseconds>(now - oldest->start);
  const Failure failure{
      .kind = Failure::Kind::stuck,
      .slot = *oldest,
      .text = fmt::format("no completion after {:.1f} s", static_cast<double>(age.count()) / 1000)};
  for (uint32_t i = 0; i < started_; ++i) {
    if (!under_way(i).failure) under_way(i).failure = failure;
  }
  batch_.clear();
  io_->cancel();
  drain_until_ = now + std::min(kDrain, timeout_);
}

}  // namespace overspill
