// Carries out single ops: kernels, copies, updates and NVMe transfers on a page store's slots.
// Each op is run by the thread of its lane; different lanes run at the same time. On a device with
// streams, ops of some lanes are put on a stream by one thread and finished by another.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/collective/collective.h"
#include "engine/model/model.h"
#include "engine/model/state_math.h"
#include "engine/run/page_store.h"
#include "engine/run/step_context.h"

namespace overspill {

class OpRunner {
 public:
  /// `layers`: null where another program computes them; then no Program has their ops.
  OpRunner(PageStore& store, const StateMath& state, const Model* layers,
           const RankGroups& ranks = {});

  /// Starts a read or a write, whose dependencies are done; run() then waits for it. One may begin
  /// while the one before it in its lane is under way. False, and nothing begun, when it has to
  /// wait for that one's pages or memory, and for other ops, which run() does whole.
  bool begin(const Program& program, const Op& op);
  /// Throws Error; the message names the page for I/O errors. A read or a write has begun.
  void run(const Program& program, const Op& op, StepContext& context);

  /// The device's stream that does a lane's ops; none: the lane's thread does them.
  std::optional<DeviceStream> stream_of(Lane lane) const;
  /// Of such a lane, an op that its thread does all the same.
  static bool on_host(const Op& op) { return op.kind == OpKind::agree; }
  /// Waits for an op on a stream, behind which the event was recorded.
  void await(const Op& op, DeviceEvent& event);
  /// Puts an op of such a lane on its stream. When it is done there, finish() takes its results,
  /// before another op of its lane is finished.
  void enqueue(const Program& program, const Op& op, StepContext& context);
  void finish(const Program& program, const Op& op, StepContext& context);
  /// Whether enqueue() needs what finish() found of the reductions before it in its lane.
  bool needs_results(const Op& op) const;
  Device& device() const { return store_.device(); }

  /// From any thread: what waits for other ranks ends with Error(rank_lost).
  void abort(const std::string& reason);

 private:
  template <class T>
  T* at(const Access& access) const;
  std::span<float> floats(const Access& access) const;
  template <class T>
  T* batch_area(uint64_t offset) const;
  const int32_t* batch_ids(std::span<const int32_t> ids, uint64_t offset, uint32_t micro_batch,
                           bool given) const;
  double* result(double& own, uint64_t offset) const;
  void copy(std::span<const Access> accesses, const Op& op);
  void finish_transfer(const Program& program, const Op& op);
  void run_forward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_head(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_backward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_reduce(std::span<const Access> accesses, const Op& op, StepContext& context);
  void start_factored_sums(const float* sums, const Op& op);
  void advance_moments(const Op& op, const StepContext& context);
  void run_agree(const Op& op, StepContext& context);
  Collective& group_of(const Op& op) const;
  void end_groups_on_stream();
  void run_all_gather(std::span<const Access> accesses);
  void run_export(std::span<const Access> accesses, const Op& op);
  void finish_loss(const Op& op, StepContext& context);
  void finish_reduce(const Op& op, StepContext& context);
  void run_update(const Program& program, const Op& op, StepContext& context);

  PageStore& store_;
  const Layout& layout_;
  const StateMath& state_;
  const Model* const layers_;
  const RankGroups ranks_;
  const BatchArea area_;

  /// Of one lane, used by its thread.
  struct Transfers {
    std::unique_ptr<Channel> channel;
    std::vector<Channel::Segment> segments, last_segments;  ///< those under way
  };
  Transfers reads_, writes_;
};

}  // namespace overspill
