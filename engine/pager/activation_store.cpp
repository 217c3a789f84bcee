// Saved, spilled, brought back.
#include "engine/pager/activation_store.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/thread.h"
#include "engine/base/units.h"
#include "engine/pager/misuse.h"

namespace overspill {
namespace {

constexpr uint64_t kPage = 4096;
/// Host memory behind the budget's, through which an activation comes back when that is full.
constexpr uint64_t kPassage = uint64_t{1} << 20;

/// A range that is given back when what was to fill it throws.
class Taken {
 public:
  Taken(FreeRanges& ranges, uint64_t at, uint64_t bytes)
      : ranges_(ranges), at_(at), bytes_(bytes), exceptions_(std::uncaught_exceptions()) {}
  ~Taken() {
    if (std::uncaught_exceptions() > exceptions_) ranges_.give_back(at_, bytes_);
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  FreeRanges& ranges_;
  const uint64_t at_, bytes_;
  const int exceptions_;
};

void wait_for(const StreamPoints& points) {
  for (const auto& point : points) point->synchronize();
}

}  // namespace

ActivationStore::ActivationStore(const Options& options)
    : options_(options),
      host_bytes_(options.host_bytes / kPage * kPage),
      host_(host_bytes_ + (options.nvme_bytes < kPage ? 0 : kPassage), "activation"),
      host_free_(host_bytes_),
      nvme_free_(options.nvme_bytes / kPage * kPage) {
  if (options_.gpu != nullptr && host_.bytes() > 0) {
    pinned_ = PinnedMemory({host_.memory(), host_.bytes()}, options_.gpu->gpu());
  }
  if (options_.nvme_bytes < kPage) return;
  if (options_.nvme_paths.empty()) {
    fail(ErrorCode::invalid_config,
         "activation_nvme_bytes: {} needs a drive; set offload.nvme_paths",
         format_bytes(options_.nvme_bytes));
  }
  volume_.emplace(VolumeOptions{.directories = options_.nvme_paths,
                                .capacity_bytes = options_.nvme_bytes / kPage * kPage,
                                .stripe_bytes = options_.io.block_size});
  IoOptions io = options_.io;
  io.buffers.clear();
  if (host_.bytes() > 0) io.buffers.push_back({host_.memory(), host_.bytes()});
  channel_ = std::make_unique<Channel>(*volume_, io, nullptr);
  thread_ = std::thread([this] { prefetch_main(); });
}

ActivationStore::~ActivationStore() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  try {
    for (auto& [number, saved] : saved_) wait_for(saved.copy.take());
    take_back(/*wait=*/true);
  } catch (const Error& error) {
    log_debug("{}", error.what());  // the GPU is lost: nothing is under way any more
  }
}

ActivationStore::Saved& ActivationStore::find(uint64_t activation) {
  const auto found = saved_.find(activation);
  if (found != saved_.end()) return found->second;
  refuse(Misuse::bad_argument,
         "activation {}: none is saved under this number, or it was restored "
         "or discarded",
         activation);
}

bool ActivationStore::spill(Saved& saved) {
  const std::optional<uint64_t> at = saved.nvme ? saved.nvme : nvme_free_.take(saved.room);
  if (!at) return false;
  if (!saved.nvme) {
    const Taken room(nvme_free_, *at, saved.room);
    wait_for(saved.copy.take());
    channel_->write(std::array{Channel::Segment{*at, host_.memory() + *saved.host, saved.room}});
    counts_.spilled_bytes += saved.bytes;
  } else {
    wait_for(saved.copy.take());
  }
  saved.nvme = at;
  host_free_.give_back(*saved.host, saved.room);
  saved.host.reset();
  return true;
}

std::optional<uint64_t> ActivationStore::make_room(uint64_t room, uint64_t keep) {
  if (room > host_bytes_) return std::nullopt;
  take_back(/*wait=*/false);
  std::optional<uint64_t> at = host_free_.take(room);
  if (!at && !leaving_.empty()) {
    take_back(/*wait=*/true);
    at = host_free_.take(room);
  }
  for (auto& [number, saved] : saved_) {
    if (at) break;
    if (number == keep || !saved.host || !spill(saved)) continue;
    at = host_free_.take(room);
  }
  return at;
}

uint64_t ActivationStore::save(const std::byte* buffer, uint64_t bytes, void* stream) {
  if (bytes == 0) refuse(Misuse::bad_argument, "an activation of no bytes");
  require_reachable(options_.gpu, buffer, "a buffer");
  const std::lock_guard lock(mutex_);
  const uint64_t room = bytes > host_bytes_ ? bytes : round_up(bytes, kPage);
  const std::optional<uint64_t> at = make_room(room, 0);
  if (!at) {
    fail(ErrorCode::does_not_fit,
         "an activation of {}: the {} of host memory and {} on NVMe for activations are full, or "
         "it is larger than the former; raise activation_host_bytes or activation_nvme_bytes",
         format_bytes(bytes), format_bytes(options_.host_bytes), format_bytes(options_.nvme_bytes));
  }
  Saved saved{.bytes = bytes, .room = room, .host = at, .nvme = {}};
  const Taken taken(host_free_, *at, room);
  copy(host_.memory() + *at, buffer, bytes, stream);
  saved.copy.end_on(options_.gpu, stream);
  counts_.saved_bytes += bytes;
  saved_.emplace(++last_, std::move(saved));
  return last_;
}

bool ActivationStore::load(uint64_t activation, Saved& saved) {
  if (saved.host) return true;
  const std::optional<uint64_t> at = make_room(saved.room, activation);
  if (!at) return false;
  const Taken room(host_free_, *at, saved.room);
  channel_->read(std::array{Channel::Segment{*saved.nvme, host_.memory() + *at, saved.room}});
  saved.host = at;
  return true;
}

/// From NVMe to the program's memory, piece by piece.
void ActivationStore::pass_through(const Saved& saved, std::byte* buffer, void* stream) {
  std::byte* const passage = host_.memory() + host_bytes_;
  for (uint64_t done = 0; done < saved.bytes; done += kPassage) {
    const uint64_t room = std::min(kPassage, saved.room - done);
    const uint64_t bytes = std::min(room, saved.bytes - done);
    channel_->read(std::array{Channel::Segment{*saved.nvme + done, passage, room}});
    copy(buffer + done, passage, bytes, stream);
    if (options_.gpu == nullptr) continue;
    MemoryUses use;
    use.end_on(options_.gpu, stream);
    wait_for(use.take());
  }
}

void ActivationStore::copy(std::byte* to, const std::byte* from, uint64_t bytes, void* stream) {
  if (options_.gpu == nullptr) {
    std::memcpy(to, from, bytes);
  } else {
    options_.gpu->copy_on(stream, to, from, bytes);
  }
}

/// Its host memory, once no copy uses it.
void ActivationStore::give_back(Saved& saved) {
  StreamPoints copies = saved.copy.take();
  if (copies.empty()) return host_free_.give_back(*saved.host, saved.room);
  leaving_.push_back({*saved.host, saved.room, std::move(copies)});
}

/// Host memory that was left, as far as its copies are done.
void ActivationStore::take_back(bool wait) {
  const auto done = [](const auto& copy) { return copy->done(); };
  while (!leaving_.empty()) {
    Leaving& first = leaving_.front();
    if (wait) {
      wait_for(std::exchange(first.copies, {}));
    } else if (!std::ranges::all_of(first.copies, done)) {
      return;
    }
    host_free_.give_back(first.at, first.room);
    leaving_.pop_front();
  }
}

void ActivationStore::forget(uint64_t activation) {
  Saved& saved = saved_.at(activation);
  if (saved.host) give_back(saved);
  if (saved.nvme) nvme_free_.give_back(*saved.nvme, saved.room);
  saved_.erase(activation);
}

void ActivationStore::restore(uint64_t activation, std::byte* buffer, uint64_t bytes,
                              void* stream) {
  require_reachable(options_.gpu, buffer, "a buffer");
  const std::lock_guard lock(mutex_);
  Saved& saved = find(activation);
  if (saved.bytes != bytes) {
    refuse(Misuse::size_mismatch, "activation {}: {} bytes; {} were saved", activation, bytes,
           saved.bytes);
  }
  if (load(activation, saved)) {
    saved.copy.begin_on(options_.gpu, stream);
    copy(buffer, host_.memory() + *saved.host, bytes, stream);
    saved.copy.end_on(options_.gpu, stream);
  } else {
    pass_through(saved, buffer, stream);
  }
  forget(activation);
}

void ActivationStore::discard(uint64_t activation) {
  const std::lock_guard lock(mutex_);
  find(activation);
  forget(activation);
}

void ActivationStore::prefetch(uint64_t activation) {
  const std::lock_guard lock(mutex_);
  if (find(activation).host) return;
  wanted_.push_back(activation);
  wake_.notify_one();
}

ActivationStore::Counts ActivationStore::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void ActivationStore::prefetch_main() {
  set_thread_name("activations");
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return closing_ || !wanted_.empty(); });
    if (closing_) return;
    const uint64_t activation = wanted_.front();
    wanted_.pop_front();
    const auto found = saved_.find(activation);
    if (found == saved_.end() || found->second.host) continue;
    try {
      load(activation, found->second);
    } catch (const Error& error) {
      // The program meets it again when it restores.
      log_debug("{}", error.what());
    }
  }
}

}  // namespace overspill
