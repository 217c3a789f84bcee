// Work into Programs, and what steps come to.
#include "engine/pager/pager_thread.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "engine/base/error.h"
#include "engine/base/thread.h"
#include "engine/train/step_decision.h"
#include "engine/train/step_results.h"

namespace overspill {
namespace {

using Kind = PagerWork::Kind;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool stands_alone(Kind kind) {
  return kind == Kind::begin_step || kind == Kind::decide || kind == Kind::task;
}

}  // namespace

PagerThread::PagerThread(PageStore& store, const StateMath& state, const Ranks& ranks,
                         const RankGroups& groups, Options options)
    : store_(store),
      layout_(store.layout()),
      ranks_(ranks),
      options_(std::move(options)),
      executor_(store, state, nullptr, {}, groups),
      pending_(layout_.model.layers.size()),
      moments_zero_(layout_.model.layers.size(), 1),
      verifier_(layout_) {
  context_.gradient_squares.assign(layout_.model.layers.size(), 0.0);
  thread_ = std::thread([this] { main(); });
}

PagerThread::~PagerThread() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

uint64_t PagerThread::add(PagerWork work) {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  queue_.push_back(std::move(work));
  wake_.notify_one();
  return ++added_;
}

void PagerThread::wait(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return ended_ || completed_ >= ticket; });
  if (completed_ < ticket) std::rethrow_exception(error_);
}

bool PagerThread::done(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  if (completed_ >= ticket) return true;
  if (error_) std::rethrow_exception(error_);
  return false;
}

void PagerThread::run(std::function<void()> task) {
  std::exception_ptr thrown;
  PagerWork work{.kind = Kind::task};
  work.task = [&] {
    try {
      task();
    } catch (...) {
      if (ranks_.size() > 1) throw;  // the others may wait for this one
      thrown = std::current_exception();
    }
  };
  wait(add(std::move(work)));
  if (thrown) std::rethrow_exception(thrown);
}

std::exception_ptr PagerThread::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void PagerThread::stop(std::exception_ptr error) {
  if (ranks_.size() > 1 && !told_.exchange(true)) error = tell_ranks(error);
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  wake_.notify_one();
}

/// The others learn why this rank ends, and it learns whose failure was the first.
std::exception_ptr PagerThread::tell_ranks(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    return std::make_exception_ptr(ranks_.cause(own));
  } catch (const std::exception& own) {
    ranks_.cause(Error(ErrorCode::internal, own.what()));
  }
  return error;
}

StepReport PagerThread::last_step() {
  const std::lock_guard lock(mutex_);
  return last_step_;
}

PagerStatistics PagerThread::statistics() {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void PagerThread::main() {
  set_thread_name("pager");
  const LogScope log(options_.log);
  const ProgressScope progress(options_.progress);
  try {
    std::deque<PagerWork> taken;
    while (take(taken)) do_all(taken);
  } catch (...) {
    stop(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  queue_.clear();
  ended_ = true;
  progress_.notify_all();
}

/// Waits for work. False when there is none and will be none.
bool PagerThread::take(std::deque<PagerWork>& taken) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return closing_ || error_ || !queue_.empty(); });
  if (error_) return false;
  taken.clear();
  taken.swap(queue_);
  return !taken.empty();
}

void PagerThread::do_all(const std::deque<PagerWork>& taken) {
  for (size_t i = 0; i < taken.size(); ++i) {
    if (error()) return;
    if (fragment_ && !joins(taken[i])) {
      run_fragment();
      complete(taken.size() - i);
    }
    plan(taken[i]);
    if (fragment_ && i + 1 < taken.size()) continue;
    if (fragment_) run_fragment();
    complete(taken.size() - i - 1);
  }
}

/// All that was queued is done, but for so many pieces of what was taken, and the queue.
void PagerThread::complete(size_t left) {
  const std::lock_guard lock(mutex_);
  completed_ = added_ - queue_.size() - left;
  progress_.notify_all();
}

/// Whether the work updates its layer.
bool PagerThread::updates(const PagerWork& work) const {
  switch (work.kind) {
    case Kind::bring:
    case Kind::update: return pending_[work.layer] != 0;
    case Kind::finish: return in_backward();
    default: return false;
  }
}

/// Whether work can be part of the Program that is being planned: all its updates read moments, or
/// none does.
bool PagerThread::joins(const PagerWork& work) const {
  if (stands_alone(work.kind)) return false;
  return !updates(work) || !fragment_zero_ || *fragment_zero_ == (moments_zero_[work.layer] != 0);
}

/// All that is put on the device's streams from now on, or the host does.
void PagerThread::begin_behind(const PagerWork& work) {
  Device& device = store_.device();
  for (const std::unique_ptr<DeviceEvent>& point : work.after) {
    if (stands_alone(work.kind)) {
      point->synchronize();
      continue;
    }
    for (size_t stream = 0; stream < kDeviceStreams; ++stream) {
      device.wait(static_cast<DeviceStream>(stream), *point);
    }
  }
}

void PagerThread::plan(const PagerWork& work) {
  if (stands_alone(work.kind)) begin_behind(work);
  switch (work.kind) {
    case Kind::begin_step: return begin_step(work);
    case Kind::decide: return decide(work);
    case Kind::task: return work.task();
    default: break;
  }
  const bool update = updates(work);
  const bool zero = moments_zero_[work.layer] != 0;
  if (fragment_ && update && !fragment_zero_ && zero) run_fragment();
  if (!fragment_) fragment_ = std::make_unique<FragmentPlanner>(layout_, update && zero);
  if (update) fragment_zero_ = zero;
  begin_behind(work);
  switch (work.kind) {
    case Kind::bring: fragment_->bring(work.layer, work.place, update); break;
    case Kind::update:
      if (update) fragment_->update(work.layer, work.place);
      break;
    case Kind::finish:
      fragment_->finish_gradient(work.layer, work.sums, work.place);
      finished_.push_back(work.layer);
      break;
    case Kind::store_sums: fragment_->store_sums(work.layer, work.sums); break;
    case Kind::load_sums: fragment_->load_sums(work.layer, work.sums); break;
    default: CHECK(false);
  }
  if (!update) return;
  if (zero) first_updates_.push_back(work.layer);
  moments_zero_[work.layer] = 0;
  pending_[work.layer] = 0;
}

void PagerThread::run_fragment() {
  Program program = fragment_->take();
  verifier_.verify(program, fragment_->parts());
  fragment_.reset();
  fragment_zero_.reset();
  if (program.ops.empty()) return;
  const int64_t begin = now_ns();
  Trace trace = executor_.run(program, context_);
  record(std::move(program), std::move(trace), begin);
}

void PagerThread::begin_step(const PagerWork& work) {
  loss_scale_ = work.rates.loss_scale;
  context_.update = update_step(layout_.options.update_rule(), work.rates.learning_rates,
                                position_.updates + 1, 1 / loss_scale_);
}

void PagerThread::decide(const PagerWork& work) {
  if (!in_backward()) loss_scale_ = work.rates.loss_scale;
  const StepResults results = share_results(context_, false, ranks_);
  const StepDecision decision =
      decide_step(results.square_sum(), results.non_finite, options_.max_grad_norm, loss_scale_);
  ++position_.step;
  const uint64_t updates_before = position_.updates;
  if (!decision.finite) {
    const bool undone = finished_.empty() || !in_backward() ||
                        !std::isfinite(results.gradient_squares[finished_.front()]);
    if (!undone) {
      fail(ErrorCode::non_finite,
           "step {}: non-finite gradient after other layers were already updated (update: "
           "in_backward cannot undo them); resume from the last checkpoint with update: "
           "next_forward",
           position_.step);
    }
    // What was to be the first update in this backward has not been one.
    for (const uint32_t layer : first_updates_) moments_zero_[layer] |= in_backward();
    count_non_finite();
  } else {
    non_finite_in_row_ = 0;
    if (in_backward()) {
      if (!finished_.empty()) ++position_.updates;
    } else {
      context_.update = update_step(layout_.options.update_rule(), work.rates.learning_rates,
                                    position_.updates + 1, decision.clip_factor / loss_scale_);
      advance_moments(store_, context_.update, *ranks_.groups().shard, work.has_gradient);
      CHECK(std::ranges::count(pending_, 1) == 0);
      pending_ = work.has_gradient;
      ++position_.updates;
    }
  }
  verifier_.end_step(pending_);
  context_.gradient_squares.assign(layout_.model.layers.size(), 0.0);
  context_.non_finite = false;
  finished_.clear();
  first_updates_.clear();
  const std::lock_guard lock(mutex_);
  last_step_ = {.step = position_.step,
                .updates = position_.updates,
                .gradient_norm = decision.grad_norm,
                .clip_factor = decision.finite ? decision.clip_factor : 1,
                .skipped = !decision.finite};
  ++statistics_.steps;
  statistics_.updates += position_.updates - updates_before;
  statistics_.skipped += decision.finite ? 0 : 1;
}

void PagerThread::count_non_finite() {
  if (++non_finite_in_row_ >= options_.max_non_finite_steps) {
    fail(ErrorCode::non_finite,
         "step {}: non-finite gradient, {} steps in a row (max_non_finite_steps: {}); lower the "
         "learning rate or the loss scale, or check the data, then resume from the last checkpoint",
         position_.step, non_finite_in_row_, options_.max_non_finite_steps);
  }
  options_.warn(fmt::format("step {}: non-finite gradient: update skipped ({} in a row)",
                            position_.step, non_finite_in_row_));
}

void PagerThread::reset(const TrainingPosition& position) {
  position_ = position;
  verifier_.forget();
  std::ranges::fill(pending_, 0);
  std::ranges::fill(moments_zero_, position.updates == 0);
  context_.gradient_squares.assign(layout_.model.layers.size(), 0.0);
  context_.non_finite = false;
  finished_.clear();
  first_updates_.clear();
  non_finite_in_row_ = 0;
}

void PagerThread::settle_moments() {
  if (position_.updates == 0) return;
  for (uint32_t l = 0; l < layout_.model.layers.size(); ++l) {
    if (moments_zero_[l] == 0) continue;
    for (uint32_t c = 0; c < layout_.chunk_count(l); ++c) {
      const PageId page = layout_.optimizer(l, c);
      const uint64_t kept = layout_.state(layout_.chunk(l, c)).remainder_bytes();
      if (layout_.page(page).bytes == 0) continue;
      const std::span<std::byte> state = kept > 0 ? store_.load(page, kept) : store_.buffer(page);
      std::ranges::fill(state.subspan(kept), std::byte{0});
      store_.store(page);
    }
    moments_zero_[l] = 0;
  }
}

}  // namespace overspill
