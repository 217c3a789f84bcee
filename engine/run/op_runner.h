// Carries out single ops: kernels, copies, updates and NVMe transfers on a page store's slots.
// Each op is run by the thread of its lane; different lanes run at the same time.
#pragma once

#include <memory>
#include <vector>

#include "engine/model/llama.h"
#include "engine/run/page_store.h"
#include "engine/run/step_context.h"

namespace overspill {

class OpRunner {
 public:
  OpRunner(PageStore& store, const Llama& llama);

  /// Throws Error; the message names the page for I/O errors.
  void run(const Program& program, const Op& op, StepContext& context);

 private:
  template <class T>
  T* at(const Access& access) const;
  void run_transfer(const Program& program, const Op& op);
  void run_forward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_head(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_backward(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_reduce(std::span<const Access> accesses, const Op& op, StepContext& context);
  void run_export(std::span<const Access> accesses, const Op& op);
  void run_update(const Program& program, const Op& op, StepContext& context);

  PageStore& store_;
  const Layout& layout_;
  const Llama& llama_;
  // Made by their lane's thread; a channel is used by one thread.
  std::unique_ptr<Channel> reader_, writer_;
  std::vector<Channel::Segment> read_segments_, write_segments_;
};

}  // namespace overspill
