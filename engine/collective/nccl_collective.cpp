// The communicator does not block: a call that NCCL has not finished is polled, and a communicator
// with a lost rank is aborted by a thread that uses it, under the lock of calls.
#include "engine/collective/nccl_collective.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "engine/collective/nccl_communicator.h"

namespace overspill {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint64_t kStagingBytes = 64 << 20;
constexpr milliseconds kLeaveTime{2000};

/// Values of one rank that pass the staging memory in one go. The same on all ranks.
uint64_t piece_values(uint32_t ranks) {
  return std::clamp<uint64_t>(kStagingBytes / (sizeof(float) * ranks), 16 << 10, 2 << 20);
}

/// Short pauses at first, then longer ones.
class Pause {
 public:
  void operator()() {
    if (++count_ < 100) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(count_ < 1000 ? 20 : 200));
  }

 private:
  uint32_t count_ = 0;
};

}  // namespace

NcclCollective::NcclCollective(const CollectiveGroup& group, NcclStream& stream,
                               const NcclOptions& options)
    : Collective(group.rank, group.size),
      group_(group),
      stream_(stream),
      options_(options),
      patience_(group.patience.value_or(group.timeout)),
      piece_(piece_values(group.size)),
      nccl_(open_nccl_library()) {
  CHECK(options.staging.size() >= nccl_staging_bytes(group.size));
  const std::string key = group.name + "/nccl/id";
  NcclUniqueId id{};
  if (group.rank == 0) {
    check("ncclGetUniqueId", nccl_.get_unique_id(&id));
    group.set(key, {id.bytes, sizeof id.bytes});
  } else {
    const std::string value = group.get(key);
    CHECK(value.size() == sizeof id.bytes);
    std::memcpy(id.bytes, value.data(), sizeof id.bytes);
  }
  NcclConfig config;
  check("ncclCommInitRankConfig",
        nccl_.init(&comm_, static_cast<int>(size()), id, static_cast<int>(rank()), &config));
}

NcclCollective::~NcclCollective() {
  if (!comm_) return;
  const auto deadline = steady_clock::now() + std::min(group_.timeout, kLeaveTime);
  int state = failed_ ? kNcclInProgress : nccl_.finalize(comm_);
  for (Pause pause; state == kNcclInProgress && !failed_ && steady_clock::now() < deadline;) {
    pause();
    if (nccl_.get_async_error(comm_, &state) != kNcclSuccess) break;
  }
  state == kNcclSuccess ? nccl_.destroy(comm_) : nccl_.abort(comm_);
}

/// The first reason stays.
void NcclCollective::set_reason(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  reason_ = reason;
  failed_ = true;
}

/// Aborts and lets the stream run dry, so that nothing touches the caller's memory any more.
void NcclCollective::lose() {
  if (comm_) {
    nccl_.abort(comm_);
    comm_ = nullptr;
    const auto deadline = steady_clock::now() + kLeaveTime;
    for (Pause pause; !stream_.idle() && steady_clock::now() < deadline;) pause();
  }
  const std::lock_guard lock(mutex_);
  throw Error(ErrorCode::rank_lost, reason_);
}

/// Waits until NCCL is done with a call itself, not with its work on the stream.
void NcclCollective::check(const char* function, int result) {
  const auto deadline = steady_clock::now() + group_.timeout;
  for (Pause pause; result == kNcclInProgress; pause()) {
    if (failed_) lose();
    if (steady_clock::now() > deadline) {
      lose(
          fmt::format("{} has waited {} ms for the other ranks: one hangs, is stopped or is cut "
                      "off; see the messages of all ranks",
                      function, group_.timeout.count()));
    }
    const int asked = nccl_.get_async_error(comm_, &result);
    if (asked != kNcclSuccess) lose("ncclCommGetAsyncError", asked);
  }
  if (result != kNcclSuccess) lose(function, result);
}

void NcclCollective::check_peers() {
  if (failed_) lose();
  int error = kNcclSuccess;
  check("ncclCommGetAsyncError", nccl_.get_async_error(comm_, &error));
  check("NCCL", error);
}

void NcclCollective::wait() {
  const auto deadline = steady_clock::now() + patience_;
  for (Pause pause;; pause()) {
    // First: work that failed leaves the stream idle too.
    const bool done = stream_.idle();
    check_peers();
    if (done) return;
    if (steady_clock::now() > deadline) lose(silence());
  }
}

void NcclCollective::await(const std::function<bool()>& done) {
  const auto deadline = steady_clock::now() + patience_;
  for (Pause pause;; pause()) {
    const bool ended = done();
    const bool late = steady_clock::now() > deadline;
    // A call under way looks for lost ranks itself.
    if (ended || late || failed_) {
      const std::lock_guard sure(call_);
      check_peers();
      if (ended) return;
      if (late) lose(silence());
    } else if (std::unique_lock chance(call_, std::try_to_lock); chance) {
      check_peers();
    }
  }
}

std::string NcclCollective::silence() const {
  return fmt::format(
      "the other ranks have not done their part for {} ms: one hangs, is stopped or is cut off; "
      "see "
      "the messages of all ranks",
      patience_.count());
}

void NcclCollective::all_gather(std::span<const std::byte> part, std::span<std::byte> whole) {
  CHECK(whole.size() == part.size() * size());
  const auto call = begin();
  if (part.empty()) return;
  check("ncclAllGather", nccl_.all_gather(part.data(), whole.data(), part.size(), kNcclUint8, comm_,
                                          stream_.handle()));
  bytes_sent_ += part.size() * (size() - 1);
  wait_unless_deferred();
}

void NcclCollective::reduce_scatter(std::span<float> values, ReduceType type) {
  CHECK(values.size() % size() == 0);
  const auto call = begin();
  const Partition parts{.total = values.size(), .ranks = size()};
  const uint64_t part = parts.length(0);
  if (part == 0) return;
  if (options_.deterministic) {
    reduce(values, type);
  } else if (type == ReduceType::bf16) {
    reduce_scatter_rounded(values, parts);
  } else {
    check("ncclReduceScatter",
          nccl_.reduce_scatter(values.data(), values.data() + parts.begin(rank()), part,
                               kNcclFloat32, kNcclSum, comm_, stream_.handle()));
  }
  bytes_sent_ += (values.size() - part) * (type == ReduceType::bf16 ? 2 : 4);
  wait_unless_deferred();
}

void NcclCollective::all_reduce(std::span<float> values, ReduceType type) {
  const auto call = begin();
  if (values.empty()) return;
  const Partition parts{.total = values.size(), .ranks = size()};
  if (options_.deterministic) {
    reduce(values, type);
    gather_floats(values, parts, type);
  } else if (type == ReduceType::bf16) {
    all_reduce_rounded(values);
  } else {
    check("ncclAllReduce", nccl_.all_reduce(values.data(), values.data(), values.size(),
                                            kNcclFloat32, kNcclSum, comm_, stream_.handle()));
  }
  const uint64_t own = parts.length(rank());
  bytes_sent_ += (values.size() - own + own * (size() - 1)) * (type == ReduceType::bf16 ? 2 : 4);
  wait_unless_deferred();
}

/// Summed on the host: few values, and the bits of any other backend.
void NcclCollective::all_reduce(std::span<double> values) {
  const auto call = begin();
  const uint64_t most = piece_ * sizeof(float) / sizeof(double);
  for (uint64_t at = 0; at < values.size(); at += most) {
    const auto piece = values.subspan(at, std::min<uint64_t>(most, values.size() - at));
    auto* staging = reinterpret_cast<double*>(options_.staging.data());
    double* own = staging + rank() * piece.size();
    stream_.copy(own, piece.data(), piece.size_bytes());
    check("ncclAllGather",
          nccl_.all_gather(own, staging, piece.size_bytes(), kNcclUint8, comm_, stream_.handle()));
    std::vector<double> all(piece.size() * size());
    stream_.copy(all.data(), staging, all.size() * sizeof(double));
    bytes_sent_ += piece.size_bytes() * (size() - 1);
    wait();
    for (size_t i = 0; i < piece.size(); ++i) {
      double sum = all[i];
      for (size_t next = i + piece.size(); next < all.size(); next += piece.size()) {
        sum += all[next];
      }
      piece[i] = sum;
    }
  }
}

void NcclCollective::broadcast(std::span<std::byte> bytes, uint32_t root) {
  CHECK(root < size());
  const auto call = begin();
  if (bytes.empty()) return;
  check("ncclBroadcast", nccl_.broadcast(bytes.data(), bytes.data(), bytes.size(), kNcclUint8,
                                         static_cast<int>(root), comm_, stream_.handle()));
  const uint32_t own = (rank() + size() - root) % size();
  for (uint32_t step = std::bit_ceil(own + 1); own + step < size(); step *= 2) {
    bytes_sent_ += bytes.size();
  }
  wait();
}

void NcclCollective::barrier() {
  const auto call = begin();
  void* staging = options_.staging.data();
  check("ncclAllReduce",
        nccl_.all_reduce(staging, staging, 1, kNcclUint8, kNcclSum, comm_, stream_.handle()));
  wait();
}

std::unique_ptr<Collective> make_nccl_collective(const CollectiveGroup& group, NcclStream& stream,
                                                 const NcclOptions& options) {
  CHECK(group.rank < group.size);
  return std::make_unique<NcclCollective>(group, stream, options);
}

uint64_t nccl_staging_bytes(uint32_t ranks) { return piece_values(ranks) * ranks * sizeof(float); }

}  // namespace overspill
