// A wrapper for tests that fails or shortens chosen requests of another backend. Requests are
// counted from 0 in submit order, retries included. Used by one thread, like what it wraps.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "nvme/async_io.h"

namespace overspill {
namespace {

constexpr uint32_t kSector = 4096;

class FaultyIo final : public AsyncIo {
 public:
  FaultyIo(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan) {
    passed_.reserve(inner_->depth());
    failed_.reserve(inner_->depth());
  }

  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }

  void submit(std::span<const IoRequest> requests) override {
    CHECK(in_flight_ + requests.size() <= depth());
    in_flight_ += requests.size();
    passed_.clear();
    for (IoRequest request : requests) {
      const uint64_t index = submitted_++;
      if (index >= plan_.fail_request && index - plan_.fail_request < plan_.times) {
        failed_.push_back({.tag = request.tag, .bytes = 0, .error = plan_.error});
        continue;
      }
      if (index == plan_.short_request) request.bytes = short_bytes(request.bytes);
      passed_.push_back(request);
    }
    if (!passed_.empty()) inner_->submit(passed_);
  }

  size_t reap(std::span<IoResult> results) override {
    CHECK(!results.empty());
    size_t count = 0;
    if (failed_.empty()) {
      count = inner_->reap(results);
    } else {
      count = std::min(results.size(), failed_.size());
      std::copy_n(failed_.begin(), count, results.begin());
      failed_.erase(failed_.begin(), failed_.begin() + static_cast<ptrdiff_t>(count));
    }
    in_flight_ -= count;
    return count;
  }

 private:
  static uint32_t short_bytes(uint32_t bytes) {
    return std::min(bytes, std::max(kSector, bytes / 2 / kSector * kSector));
  }

  std::unique_ptr<AsyncIo> inner_;
  const FaultPlan plan_;
  uint64_t submitted_ = 0;
  size_t in_flight_ = 0;
  std::vector<IoRequest> passed_;
  std::vector<IoResult> failed_;
};

}  // namespace

std::unique_ptr<AsyncIo> make_faulty_io(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan) {
  return std::make_unique<FaultyIo>(std::move(inner), plan);
}

}  // namespace overspill
