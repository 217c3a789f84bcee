// The communicator does not block: a call that NCCL has not finished is polled, and a communicator
// with a lost rank is aborted by the thread that uses it, never by another one.
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
#include "engine/collective/nccl_library.h"

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

class NcclCollective final : public Collective {
 public:
  NcclCollective(const CollectiveGroup& group, NcclStream& stream, const NcclOptions& options);
  ~NcclCollective() override;

  void all_gather(std::span<const std::byte> part, std::span<std::byte> whole) override;
  void reduce_scatter(std::span<float> values, ReduceType type) override;
  void all_reduce(std::span<float> values, ReduceType type) override;
  void all_reduce(std::span<double> values) override;
  void broadcast(std::span<std::byte> bytes, uint32_t root) override;
  void barrier() override;
  void abort(const std::string& reason) override { set_reason(reason); }

 private:
  void set_reason(const std::string& reason);
  void begin() {
    if (failed_) lose();
  }
  [[noreturn]] void lose();
  [[noreturn]] void lose(const std::string& what) {
    set_reason(fmt::format("group \"{}\": rank {}: {}", group_.name, group_.member(rank()), what));
    lose();
  }
  [[noreturn]] void lose(const char* function, int error) {
    lose(fmt::format("{}: {} ({}); another rank is lost or failed, see the messages of all ranks",
                     function, nccl_.error_text(error), nccl_.last_error(comm_)));
  }
  void check(const char* function, int result);
  void wait();
  template <class F>
  void exchange(F&& sends_and_receives);

  void reduce(std::span<float> values, ReduceType type);
  void gather_floats(std::span<float> values, const Partition& parts, ReduceType type);
  void reduce_scatter_rounded(std::span<float> values, const Partition& parts);
  void all_reduce_rounded(std::span<float> values);

  // Staging memory: a place for each rank, of float32 or of bf16; in the latter case the second
  // half is for what goes out.
  float* incoming(uint32_t index) {
    return reinterpret_cast<float*>(options_.staging.data()) + index * piece_;
  }
  uint16_t* incoming_bf16(uint32_t index) {
    return reinterpret_cast<uint16_t*>(options_.staging.data()) + index * piece_;
  }
  uint16_t* outgoing_bf16(uint32_t index) { return incoming_bf16(size() + index); }

  const CollectiveGroup group_;
  NcclStream& stream_;
  const NcclOptions options_;
  const uint64_t piece_;
  const NcclLibrary nccl_;
  NcclComm* comm_ = nullptr;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::string reason_;
};

NcclCollective::NcclCollective(const CollectiveGroup& group, NcclStream& stream,
                               const NcclOptions& options)
    : Collective(group.rank, group.size),
      group_(group),
      stream_(stream),
      options_(options),
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

void NcclCollective::wait() {
  const auto deadline = steady_clock::now() + group_.timeout;
  for (Pause pause;; pause()) {
    // First: work that failed leaves the stream idle too.
    const bool done = stream_.idle();
    if (failed_) lose();
    int error = kNcclSuccess;
    check("ncclCommGetAsyncError", nccl_.get_async_error(comm_, &error));
    check("NCCL", error);
    if (done) return;
    if (steady_clock::now() > deadline) {
      lose(
          fmt::format("the other ranks have not done their part for {} ms: one hangs, is stopped "
                      "or is cut off; see the messages of all ranks",
                      group_.timeout.count()));
    }
  }
}

/// A group of sends and receives: NCCL starts them together.
template <class F>
void NcclCollective::exchange(F&& sends_and_receives) {
  check("ncclGroupStart", nccl_.group_start());
  int first_error = kNcclSuccess;
  sends_and_receives([&](int result) {
    if (result != kNcclInProgress && first_error == kNcclSuccess) first_error = result;
  });
  const int result = nccl_.group_end();  // also after an error: it belongs to the start
  check("ncclSend", first_error);
  check("ncclGroupEnd", result);
}

void NcclCollective::all_gather(std::span<const std::byte> part, std::span<std::byte> whole) {
  CHECK(whole.size() == part.size() * size());
  begin();
  if (part.empty()) return;
  check("ncclAllGather", nccl_.all_gather(part.data(), whole.data(), part.size(), kNcclUint8, comm_,
                                          stream_.handle()));
  bytes_sent_ += part.size() * (size() - 1);
  wait();
}

void NcclCollective::reduce_scatter(std::span<float> values, ReduceType type) {
  CHECK(values.size() % size() == 0);
  begin();
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
  wait();
}

void NcclCollective::all_reduce(std::span<float> values, ReduceType type) {
  begin();
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
  wait();
}

/// Summed on the host: few values, and the bits of any other backend.
void NcclCollective::all_reduce(std::span<double> values) {
  begin();
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
  begin();
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
  begin();
  void* staging = options_.staging.data();
  check("ncclAllReduce",
        nccl_.all_reduce(staging, staging, 1, kNcclUint8, kNcclSum, comm_, stream_.handle()));
  wait();
}

/// This rank's part becomes the sum in the order of ranks. Only put on the stream.
void NcclCollective::reduce(std::span<float> values, ReduceType type) {
  const Partition parts{.total = values.size(), .ranks = size()};
  const bool bf16 = type == ReduceType::bf16;
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const auto length = [&](uint32_t r) { return piece_length(parts.length(r), piece_, p); };
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    const uint64_t own = length(rank());
    for (uint32_t r = 0; bf16 && r < size(); ++r) {
      uint16_t* rounded = r == rank() ? incoming_bf16(r) : outgoing_bf16(r);
      if (length(r) > 0) stream_.round_to_bf16(piece_of(r), rounded, length(r));
    }
    if (!bf16 && own > 0) stream_.copy(incoming(rank()), piece_of(rank()), own * sizeof(float));
    exchange([&](auto&& keep) {
      const int datatype = bf16 ? kNcclBfloat16 : kNcclFloat32;
      for (uint32_t r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const void* out = bf16 ? static_cast<void*>(outgoing_bf16(r)) : piece_of(r);
        void* in = bf16 ? static_cast<void*>(incoming_bf16(r)) : incoming(r);
        const int peer = static_cast<int>(r);
        if (length(r) > 0) {
          keep(nccl_.send(out, length(r), datatype, peer, comm_, stream_.handle()));
        }
        if (own > 0) keep(nccl_.receive(in, own, datatype, peer, comm_, stream_.handle()));
      }
    });
    if (own > 0) {
      stream_.sum_in_rank_order(type, options_.staging.data(), piece_, size(), piece_of(rank()),
                                own);
    }
  }
}

/// Every rank's part to all others; with bf16 rounded, on the rank that has it too.
void NcclCollective::gather_floats(std::span<float> values, const Partition& parts,
                                   ReduceType type) {
  const bool bf16 = type == ReduceType::bf16;
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const auto length = [&](uint32_t r) { return piece_length(parts.length(r), piece_, p); };
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    const uint64_t own = length(rank());
    uint16_t* const rounded = incoming_bf16(rank());
    if (bf16 && own > 0) stream_.round_to_bf16(piece_of(rank()), rounded, own);
    exchange([&](auto&& keep) {
      const int datatype = bf16 ? kNcclBfloat16 : kNcclFloat32;
      for (uint32_t r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const void* out = bf16 ? static_cast<void*>(rounded) : piece_of(rank());
        void* in = bf16 ? static_cast<void*>(incoming_bf16(r)) : piece_of(r);
        const int peer = static_cast<int>(r);
        if (own > 0) keep(nccl_.send(out, own, datatype, peer, comm_, stream_.handle()));
        if (length(r) > 0) {
          keep(nccl_.receive(in, length(r), datatype, peer, comm_, stream_.handle()));
        }
      }
    });
    for (uint32_t r = 0; bf16 && r < size(); ++r) {
      if (length(r) > 0) stream_.widen_bf16(incoming_bf16(r), piece_of(r), length(r));
    }
  }
}

void NcclCollective::reduce_scatter_rounded(std::span<float> values, const Partition& parts) {
  uint16_t *const packed = outgoing_bf16(0), *const sum = incoming_bf16(0);
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const uint64_t count = piece_length(parts.length(0), piece_, p);
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    for (uint32_t r = 0; r < size(); ++r) {
      stream_.round_to_bf16(piece_of(r), packed + r * count, count);
    }
    check("ncclReduceScatter", nccl_.reduce_scatter(packed, sum, count, kNcclBfloat16, kNcclSum,
                                                    comm_, stream_.handle()));
    stream_.widen_bf16(sum, piece_of(rank()), count);
  }
}

void NcclCollective::all_reduce_rounded(std::span<float> values) {
  uint16_t* const rounded = outgoing_bf16(0);
  const uint64_t most = piece_ * size();
  for (uint64_t at = 0; at < values.size(); at += most) {
    const auto piece = values.subspan(at, std::min<uint64_t>(most, values.size() - at));
    stream_.round_to_bf16(piece.data(), rounded, piece.size());
    check("ncclAllReduce", nccl_.all_reduce(rounded, rounded, piece.size(), kNcclBfloat16, kNcclSum,
                                            comm_, stream_.handle()));
    stream_.widen_bf16(rounded, piece.data(), piece.size());
  }
}

}  // namespace

std::unique_ptr<Collective> make_nccl_collective(const CollectiveGroup& group, NcclStream& stream,
                                                 const NcclOptions& options) {
  CHECK(group.rank < group.size);
  return std::make_unique<NcclCollective>(group, stream, options);
}

uint64_t nccl_staging_bytes(uint32_t ranks) { return piece_values(ranks) * ranks * sizeof(float); }

}  // namespace overspill
