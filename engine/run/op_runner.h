// Carries out single ops: kernels, copies, updates and NVMe transfers on a page store's slots.
// Each op is run by the thread of its lane; different lanes run at the same time.
#pragma once

#include <memory>
#include <vector>

#include "engine/collective/collective.h"
#include "engine/model/model.h"
#include "engine/run/page_store.h"
#include "engine/run/step_context.h"

namespace overspill {

class OpRunner {
 public:
  OpRunner(PageStore& store, const Model& model, const RankGroups& ranks = {});

  /// Starts a read or a write, whose dependencies are done; run() then waits for it. One may begin
  /// while the one before it in its lane is under way. False, and nothing begun, when it has to
  /// wait for that one's pages or memory, and for other ops, which run() does whole.
  bool begin(const Program& program, const Op& op);
  /// Throws Error; the message names the page for I/O errors. A read or a write has begun.
  void run(const Program& program, const Op& op, StepContext& context);
  /// From any thread: what waits for other ranks ends with Error(rank_lost).
  void abort(const std::string& reason);

 private:
  template <class T>
  T* at(const Access& access) const;
  std::span<float> floats(const Access& access) const;
  void finish_transfer(const Program& program, const Op& op);
  void run_forward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_head(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_backward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_reduce(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_factored_sums(const float* sums, const Op& op, StepContext& context);
  void advance_moments(const Op& op, const StepContext& context);
  void run_agree(const Op& op, StepContext& context);
  void run_all_gather(std::span<const Access> accesses);
  void run_export(std::span<const Access> accesses, const Op& op);
  void run_update(const Program& program, const Op& op, StepContext& context);

  PageStore& store_;
  const Layout& layout_;
  const Model& model_;
  const RankGroups ranks_;

  /// Of one lane, used by its thread.
  struct Transfers {
    std::unique_ptr<Channel> channel;
    std::vector<Channel::Segment> segments, last_segments;  ///< those under way
  };
  Transfers reads_, writes_;
};

}  // namespace overspill
