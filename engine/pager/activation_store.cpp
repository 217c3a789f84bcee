// Saved, spilled, brought back.
#include "engine/pager/activation_store.h"

#include <array>
#include <cstring>

#include "engine/base/log.h"
#include "engine/base/thread.h"
#include "engine/base/units.h"
#include "engine/pager/misuse.h"

namespace overspill {
namespace {

constexpr uint64_t kPage = 4096;

}  // namespace

ActivationStore::ActivationStore(const Options& options)
    : options_(options),
      host_(options.host_bytes / kPage * kPage, "activation"),
      host_free_(host_.bytes()),
      nvme_free_(options.nvme_bytes / kPage * kPage) {
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
    channel_->write(std::array{Channel::Segment{*at, host_.memory() + *saved.host, saved.room}});
    counts_.spilled_bytes += saved.bytes;
  }
  saved.nvme = at;
  host_free_.give_back(*saved.host, saved.room);
  saved.host.reset();
  return true;
}

std::optional<uint64_t> ActivationStore::make_room(uint64_t room, uint64_t keep) {
  if (room > host_.bytes()) return std::nullopt;
  std::optional<uint64_t> at = host_free_.take(room);
  for (auto& [number, saved] : saved_) {
    if (at) break;
    if (number == keep || !saved.host || !spill(saved)) continue;
    at = host_free_.take(room);
  }
  return at;
}

uint64_t ActivationStore::save(const std::byte* buffer, uint64_t bytes) {
  if (bytes == 0) refuse(Misuse::bad_argument, "an activation of no bytes");
  const std::lock_guard lock(mutex_);
  const uint64_t room = bytes > host_.bytes() ? bytes : round_up(bytes, kPage);
  const std::optional<uint64_t> at = make_room(room, 0);
  if (!at) {
    fail(ErrorCode::does_not_fit,
         "an activation of {}: the {} of host memory and {} on NVMe for activations are full, or "
         "it is larger than the former; raise activation_host_bytes or activation_nvme_bytes",
         format_bytes(bytes), format_bytes(options_.host_bytes), format_bytes(options_.nvme_bytes));
  }
  std::memcpy(host_.memory() + *at, buffer, bytes);
  counts_.saved_bytes += bytes;
  saved_[++last_] = {.bytes = bytes, .room = room, .host = at, .nvme = {}};
  return last_;
}

void ActivationStore::load(uint64_t activation, Saved& saved) {
  if (saved.host) return;
  const std::optional<uint64_t> at = make_room(saved.room, activation);
  if (!at) {
    fail(ErrorCode::does_not_fit,
         "activation {} of {}: no host memory is free to bring it back; restore or discard others",
         activation, format_bytes(saved.bytes));
  }
  channel_->read(std::array{Channel::Segment{*saved.nvme, host_.memory() + *at, saved.room}});
  saved.host = at;
}

void ActivationStore::forget(uint64_t activation) {
  const Saved& saved = saved_.at(activation);
  if (saved.host) host_free_.give_back(*saved.host, saved.room);
  if (saved.nvme) nvme_free_.give_back(*saved.nvme, saved.room);
  saved_.erase(activation);
}

void ActivationStore::restore(uint64_t activation, std::byte* buffer, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Saved& saved = find(activation);
  if (saved.bytes != bytes) {
    refuse(Misuse::size_mismatch, "activation {}: {} bytes; {} were saved", activation, bytes,
           saved.bytes);
  }
  load(activation, saved);
  std::memcpy(buffer, host_.memory() + *saved.host, bytes);
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
