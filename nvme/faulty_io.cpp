// A wrapper for tests that spoils chosen requests of another backend, as drives, links and kernels
// do. Used by one thread, like what it wraps. Everything random is drawn from the plan's seed.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "nvme/async_io.h"

namespace overspill {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kSector = 4096;

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};

class FaultyIo final : public AsyncIo {
 public:
  FaultyIo(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan);

  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }
  void submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, milliseconds timeout) override;
  void cancel() override;

 private:
  /// What has to be done to a request's result when the inner backend is through with it.
  struct Spoiled {
    IoRequest request;
    FaultKind kind;
    std::unique_ptr<std::byte, Freed> copy;  // what a flipped write writes
  };
  struct Held {
    IoResult result;
    Clock::time_point due;
  };

  std::optional<Fault> fault_of(uint64_t index) const;
  void start(IoRequest request, uint64_t index);
  void start_torn(IoRequest request);
  void start_flipped(IoRequest request);
  void hold(const IoResult& result);
  IoResult outcome(const IoResult& result);
  /// Moves what the inner backend has finished into held_.
  void take_inner(milliseconds timeout);
  size_t take_due(std::span<IoResult> results);
  uint64_t draw(uint64_t below) { return random_below(plan_.seed + 1, draws_++, below); }

  const FaultPlan plan_;
  uint64_t submitted_ = 0, draws_ = 0;
  size_t inner_in_flight_ = 0;
  std::vector<IoRequest> passed_;
  std::vector<Spoiled> spoiled_;
  std::vector<uint64_t> stuck_;  // tags
  std::vector<Held> held_;       // finished, not yet reaped
  std::vector<IoResult> reaped_;
  std::unique_ptr<AsyncIo> inner_;  // goes first: it waits for what still uses the copies
};

FaultyIo::FaultyIo(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan)
    : plan_(plan), inner_(std::move(inner)) {
  passed_.reserve(inner_->depth());
  held_.reserve(inner_->depth());
  reaped_.resize(inner_->depth());
}

std::optional<Fault> FaultyIo::fault_of(uint64_t index) const {
  const auto covers = [&](uint64_t first, uint64_t times) {
    return index >= first && index - first < times;
  };
  if (covers(plan_.fail_request, plan_.times)) return Fault{.error = plan_.error};
  if (index == plan_.short_request) return Fault{.kind = FaultKind::cut};
  for (const Fault& fault : plan_.faults) {
    if (covers(fault.request, fault.times)) return fault;
  }
  return std::nullopt;
}

void FaultyIo::submit(std::span<const IoRequest> requests) {
  CHECK(inner_in_flight_ + held_.size() + stuck_.size() + requests.size() <= depth());
  passed_.clear();
  for (const IoRequest& request : requests) start(request, submitted_++);
  inner_in_flight_ += passed_.size();
  if (!passed_.empty()) inner_->submit(passed_);
}

void FaultyIo::start(IoRequest request, uint64_t index) {
  const std::optional<Fault> fault = fault_of(index);
  if (!fault) {
    passed_.push_back(request);
    return;
  }
  switch (fault->kind) {
    case FaultKind::error: return hold({.tag = request.tag, .bytes = 0, .error = fault->error});
    case FaultKind::stuck: return stuck_.push_back(request.tag);
    case FaultKind::torn: return start_torn(request);
    case FaultKind::bit_flip: return start_flipped(request);
    case FaultKind::cut:
      request.bytes =
          std::min(request.bytes, std::max(kSector, request.bytes / 2 / kSector * kSector));
      break;
    case FaultKind::misdirected: {
      const int64_t place = static_cast<int64_t>(request.offset) + fault->distance;
      request.offset = static_cast<uint64_t>(std::max<int64_t>(place, kSector));
      break;
    }
  }
  passed_.push_back(request);
}

void FaultyIo::start_torn(IoRequest request) {
  const uint32_t half = request.bytes / 2 / kSector * kSector;
  if (!request.write) {
    passed_.push_back(request);
  } else if (half == 0) {  // all of it is lost
    hold({.tag = request.tag, .bytes = request.bytes, .error = 0});
  } else {
    spoiled_.push_back({.request = request, .kind = FaultKind::torn, .copy = nullptr});
    request.bytes = half;
    passed_.push_back(request);
  }
}

void FaultyIo::start_flipped(IoRequest request) {
  Spoiled spoiled{.request = request, .kind = FaultKind::bit_flip, .copy = nullptr};
  if (request.write && request.bytes > 0) {
    spoiled.copy.reset(static_cast<std::byte*>(
        std::aligned_alloc(kSector, (request.bytes + kSector - 1) / kSector * kSector)));
    std::memcpy(spoiled.copy.get(), request.memory, request.bytes);
    request.memory = spoiled.copy.get();
    request.memory[draw(request.bytes)] ^= static_cast<std::byte>(1u << draw(8));
  }
  spoiled_.push_back(std::move(spoiled));
  passed_.push_back(request);
}

void FaultyIo::hold(const IoResult& result) {
  Clock::duration delay{0};
  if (plan_.latency.count() > 0) {
    delay = std::chrono::microseconds(draw(static_cast<uint64_t>(plan_.latency.count())));
  }
  held_.push_back({result, Clock::now() + delay});
}

IoResult FaultyIo::outcome(const IoResult& result) {
  const auto found = std::ranges::find_if(
      spoiled_, [&](const Spoiled& spoiled) { return spoiled.request.tag == result.tag; });
  if (found == spoiled_.end()) return result;
  IoResult changed = result;
  if (result.error == 0) {
    const IoRequest& request = found->request;
    if (found->kind == FaultKind::torn) changed.bytes = request.bytes;
    if (found->kind == FaultKind::bit_flip && !request.write && result.bytes > 0) {
      request.memory[draw(result.bytes)] ^= static_cast<std::byte>(1u << draw(8));
    }
  }
  spoiled_.erase(found);
  return changed;
}

void FaultyIo::take_inner(milliseconds timeout) {
  if (inner_in_flight_ == 0) return;
  const size_t count = inner_->reap(reaped_, timeout);
  inner_in_flight_ -= count;
  for (const IoResult& result : std::span(reaped_).first(count)) hold(outcome(result));
}

size_t FaultyIo::take_due(std::span<IoResult> results) {
  const Clock::time_point now = Clock::now();
  size_t count = 0;
  const size_t most = plan_.reorder ? 1 : results.size();
  while (count < most) {
    std::vector<size_t> due;
    for (size_t i = 0; i < held_.size(); ++i) {
      if (held_[i].due <= now) due.push_back(i);
    }
    if (due.empty()) break;
    const size_t chosen = due[plan_.reorder ? draw(due.size()) : 0];
    results[count++] = held_[chosen].result;
    held_.erase(held_.begin() + static_cast<ptrdiff_t>(chosen));
  }
  return count;
}

size_t FaultyIo::reap(std::span<IoResult> results, milliseconds timeout) {
  CHECK(!results.empty());
  const Clock::time_point end =
      timeout == kForever ? Clock::time_point::max() : Clock::now() + timeout;
  while (inner_in_flight_ + held_.size() + stuck_.size() > 0) {
    // Without held results there is nothing to hurry back for.
    take_inner(held_.empty() && stuck_.empty() ? timeout : milliseconds(0));
    if (const size_t count = take_due(results); count > 0) return count;
    if (Clock::now() >= end) return 0;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return 0;
}

void FaultyIo::cancel() {
  inner_->cancel();
  if (!plan_.cancellable) return;
  for (const uint64_t tag : stuck_) hold({.tag = tag, .bytes = 0, .error = ECANCELED});
  stuck_.clear();
}

}  // namespace

std::unique_ptr<AsyncIo> make_faulty_io(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan) {
  return std::make_unique<FaultyIo>(std::move(inner), plan);
}

}  // namespace overspill
