// Steps: what ends one, and what becomes of its update.
#include <algorithm>
#include <cmath>

#include "engine/base/error.h"
#include "engine/pager/pager.h"

namespace overspill {
namespace {

using Kind = PagerWork::Kind;

}  // namespace

void Pager::check_rates(const StepRates& rates) const {
  if (rates.learning_rates.size() < registry_.groups()) {
    refuse(Misuse::bad_argument,
           "{} learning rates, and tensors are in groups 0 to {}: give one for each group",
           rates.learning_rates.size(), registry_.groups() - 1);
  }
  for (const double rate : rates.learning_rates) {
    if (std::isfinite(rate) && rate >= 0) continue;
    refuse(Misuse::bad_argument, "a learning rate of {}: it is finite and not negative", rate);
  }
  if (std::isfinite(rates.loss_scale) && rates.loss_scale > 0) return;
  refuse(Misuse::bad_argument, "a loss scale of {}: it is finite and positive", rates.loss_scale);
}

void Pager::begin_step(const StepRates& rates) {
  const Lock lock(mutex_);
  require_running();
  if (!in_backward()) {
    refuse(Misuse::bad_argument,
           "a step that begins with its options, which is for offload.update: in_backward; with "
           "next_forward they are given when the step ends");
  }
  check_rates(rates);
  if (begun_) {
    refuse(Misuse::bad_argument, "the step has begun already; end it first");
  }
  begun_ = true;
  thread_.add({.kind = Kind::begin_step, .rates = rates});
}

void Pager::step(const StepRates& rates, bool allow_missing) {
  Lock lock(mutex_);
  require_running();
  if (in_backward() && !begun_) {
    refuse(Misuse::step_not_started, "the step has not begun: its learning rate is missing");
  }
  if (!in_backward()) check_rates(rates);
  wait_for_adding(lock);
  std::vector<char> has_gradient(stored_.size());
  std::vector<uint32_t> incomplete;
  for (uint32_t l = 0; l < stored_.size(); ++l) {
    const Gradient& gradient = stored_[l].gradient;
    if (!layout_.model.layers[l].trainable()) continue;
    const bool some = gradient.complete || gradient.sums != Gradient::Sums::none;
    has_gradient[l] = some;
    if (gradient.complete) continue;
    if (!allow_missing) {
      refuse(Misuse::gradient_missing,
             "the step ends, and the gradient of layer \"{}\" is {}: submit all of it ({} "
             "micro-batches), or allow what is missing",
             registry_.owner(l).name, some ? "not complete" : "missing",
             config_.gradient_accumulation_steps);
    }
    if (some) incomplete.push_back(l);
  }
  // Those in slots make room for those in pages.
  std::ranges::stable_partition(
      incomplete, [&](uint32_t l) { return stored_[l].gradient.sums == Gradient::Sums::slot; });
  for (const uint32_t l : incomplete) {
    begin_adding(lock, l, nullptr, [] {});
    finish_incomplete(lock, l);
  }
  for (uint32_t l = 0; l < stored_.size(); ++l) catch_up(l);
  PagerWork work{.kind = Kind::decide, .rates = rates};
  work.has_gradient = std::move(has_gradient);
  decided_ = thread_.add(std::move(work));
  ++steps_;
  begun_ = false;
  for (StoredLayer& layer : stored_) {
    layer.gradient.complete = false;
    std::ranges::fill(layer.gradient.counts, 0);
  }
  order_.end_step();
  prefetch_next();
}

/// Until no thread adds to sums.
void Pager::wait_for_adding(Lock& lock) {
  sums_free_.wait(lock, [&] {
    return std::ranges::none_of(stored_, [](const StoredLayer& s) { return s.gradient.adding; });
  });
  require_running();
}

std::optional<StepReport> Pager::poll_step() {
  const Lock lock(mutex_);
  require_running();
  if (decided_ == 0) refuse(Misuse::step_not_started, "no step has ended yet");
  if (!thread_.done(decided_)) return std::nullopt;
  return thread_.last_step();
}

StepReport Pager::wait_step() {
  Lock lock(mutex_);
  require_running();
  if (decided_ == 0) refuse(Misuse::step_not_started, "no step has ended yet");
  const uint64_t decided = decided_;
  lock.unlock();
  thread_.wait(decided);
  return thread_.last_step();
}

void Pager::require_all_released(const char* call) const {
  for (uint32_t layer = 0; layer < acquired_.size(); ++layer) {
    if (!acquired_[layer]) continue;
    refuse(Misuse::layers_held, "{} needs all layers released, and layer {} \"{}\" is held", call,
           layer, registry_.layers()[layer].name);
  }
}

/// From here on the lock is held: nobody acquires, and nobody adds to sums.
void Pager::settle(Lock& lock, const char* call) {
  wait_for_adding(lock);
  require_all_released(call);
  for (uint32_t l = 0; l < stored_.size(); ++l) catch_up(l);
  thread_.wait(thread_.add({.kind = Kind::task, .task = [] {}, .after = all_uses()}));
}

void Pager::flush() {
  Lock lock(mutex_);
  settle(lock, "applying pending updates");
}

PagerStatistics Pager::statistics() { return thread_.statistics(); }

void Pager::start_trace() { thread_.start_trace(); }

void Pager::write_trace(const std::filesystem::path& path) {
  thread_.run([&] { thread_.write_trace(path); });
}

}  // namespace overspill
