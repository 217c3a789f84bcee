// Slower drives than there are: an AsyncIo wrapper that holds completions back so that each file
// moves at most so many bytes per second. Wrappers that share a limit share the drive, as a reader
// and a writer do. One thread per wrapper.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "nvme/async_io.h"

namespace overspill::bench {

/// When the bytes asked of each file so far would be done on a drive of that rate. Thread-safe.
class RateLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;
  explicit RateLimit(double bytes_per_second) : rate_(bytes_per_second) {}

  Time done_at(uint32_t file, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (file >= free_at_.size()) free_at_.resize(file + 1);
    const std::chrono::duration<double> work(static_cast<double>(bytes) / rate_);
    Time& free = free_at_[file];
    free = std::max(free, std::chrono::steady_clock::now()) +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(work);
    return free;
  }

 private:
  double rate_;
  std::mutex mutex_;
  std::vector<Time> free_at_;
};

class ThrottledIo final : public AsyncIo {
 public:
  ThrottledIo(std::unique_ptr<AsyncIo> inner, std::shared_ptr<RateLimit> limit)
      : inner_(std::move(inner)), limit_(std::move(limit)) {}

  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }

  void submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) {
      done_at_[request.tag] = limit_->done_at(request.file, request.bytes);
    }
    in_flight_ += requests.size();
    inner_->submit(requests);
  }

  void cancel() override { inner_->cancel(); }
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds) override {
    for (;;) {
      if (const size_t count = take_due(results); count > 0) return count;
      if (in_flight_ > 0) {
        std::vector<IoResult> taken(results.size());
        taken.resize(inner_->reap(taken));
        CHECK(!taken.empty() && taken.size() <= in_flight_);
        in_flight_ -= taken.size();
        for (const IoResult& result : taken) held_.emplace_back(done_at_.at(result.tag), result);
      } else if (!held_.empty()) {
        const auto first = std::ranges::min_element(held_, {}, &Held::first);
        std::this_thread::sleep_until(first->first);
      } else {
        return 0;
      }
    }
  }

 private:
  using Held = std::pair<RateLimit::Time, IoResult>;

  size_t take_due(std::span<IoResult> results) {
    const auto now = std::chrono::steady_clock::now();
    size_t count = 0;
    for (auto held = held_.begin(); held != held_.end() && count < results.size();) {
      if (held->first > now) {
        ++held;
        continue;
      }
      results[count++] = held->second;
      held = held_.erase(held);
    }
    return count;
  }

  std::unique_ptr<AsyncIo> inner_;
  std::shared_ptr<RateLimit> limit_;
  std::unordered_map<uint64_t, RateLimit::Time> done_at_;
  std::vector<Held> held_;
  size_t in_flight_ = 0;  // in `inner_`
};

}  // namespace overspill::bench
