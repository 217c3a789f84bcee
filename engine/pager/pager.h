// The engine for layers that another program computes: it brings weights, adds up gradients, steps
// and updates. What moves when is decided by the program's calls alone, in their order, and done by
// a thread of its own (pager_thread.h). Every member is for any thread; a call that waits keeps no
// other one from calling. Throws MisuseError for what a program does wrong, having changed nothing.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "engine/base/dtype.h"
#include "engine/pager/access_order.h"
#include "engine/pager/layer_registry.h"
#include "engine/pager/misuse.h"
#include "engine/pager/pager_thread.h"
#include "engine/pager/weight_ring.h"
#include "engine/train/config.h"
#include "engine/train/rank_setup.h"

namespace overspill {

/// A gradient, or weights, in the program's memory.
struct TensorValues {
  const void* values = nullptr;
  DType type = DType::f32;
  uint64_t count = 0;
};

struct AccessCounts {
  uint64_t acquires = 0, waited = 0;
  double wait_seconds = 0;
  uint64_t deviations = 0, deviation_bytes = 0;
};

class Pager {
 public:
  struct Options {
    uint32_t held_layers = 1;       ///< that the program holds at once
    bool micro_batch_major = true;  ///< all layers pass a micro-batch before the next one begins
    const LogSink* log = nullptr;   ///< of its threads, as `progress`: outlives it, or null
    const ProgressObserver* progress = nullptr;
    std::function<void(const std::string&)> warn;
    std::optional<uint32_t> gpu{};  ///< the device; else the host
  };
  /// Plans and allocates. `ranks` outlives it. All ranks call it at once.
  Pager(LayerRegistry registry, const TrainConfig& config, const Ranks& ranks, Options options);
  ~Pager();

  const Layout& layout() const { return layout_; }
  /// The drives of this rank.
  const std::vector<std::filesystem::path>& nvme_paths() const {
    return config_.offload.nvme_paths;
  }
  /// Null where the device is the host.
  CudaDevice* gpu() const { return gpu_; }
  const LayerRegistry& registry() const { return registry_; }
  /// Throws the first error that was met in the background, if there is one.
  void require_running();
  /// Waits for all that is queued; throws the first error.
  void drain();

  // ---- weights (pager_use.cpp) ----

  void declare_order(std::vector<uint32_t> order);
  /// Holds a layer; `weights` gets a pointer for each tensor, unless it is empty. On return they
  /// are there.
  /// `stream`, here and below: the program's (cudaStream_t) that uses the memory on a GPU; what it
  /// has put there comes before what the pager does with the memory. Null on the host.
  void acquire(uint32_t layer, std::span<const void*> weights, void* stream);
  void prefetch(uint32_t layer);
  void release(uint32_t layer, void* stream);
  AccessCounts access_counts();

  // ---- gradients (pager_gradients.cpp) ----

  void submit(uint32_t layer, uint32_t tensor, const TensorValues& gradient, void* stream);
  /// All of a layer's trainable tensors that are not tied, at their offsets.
  void submit_flat(uint32_t layer, const TensorValues& gradients, void* stream);
  void gradients_done(uint32_t layer);

  // ---- steps (pager_steps.cpp) ----

  void begin_step(const StepRates& rates);
  /// `rates` is not looked at where updates run in the backward.
  void step(const StepRates& rates, bool allow_missing);
  /// Nothing as long as the last step is under way.
  std::optional<StepReport> poll_step();
  StepReport wait_step();
  void flush();
  PagerStatistics statistics();
  void start_trace();
  void write_trace(const std::filesystem::path& path);

  // ---- state (pager_state.cpp) ----

  void load_weights(const std::filesystem::path& path);
  void initialize_weights(uint64_t seed, double deviation);
  void write_tensor(const std::string& name, const TensorValues& values);
  void read_tensor(const std::string& name, void* values, DType type, uint64_t count);
  void export_weights(const std::filesystem::path& directory, const std::string& config_json);
  /// Returns when pending updates are applied; the files are written in the background.
  void save_checkpoint(const CheckpointOptions& options, const std::string& config_json);
  bool poll_checkpoint();
  void wait_checkpoint();
  void load_checkpoint(const std::filesystem::path& directory);
  std::string user_state();

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// A stored layer's gradient of the step under way.
  struct Gradient {
    enum class Sums : uint8_t { none, slot, paged };
    Sums sums = Sums::none;
    SlotId slot;
    std::vector<uint32_t> counts;  ///< of each tensor's contributions
    bool complete = false;
    bool adding = false;  ///< a thread is at work on the sums
  };
  struct SumSlot {
    SlotId slot;
    std::optional<uint32_t> layer;  ///< whose sums it holds
    uint64_t free = 0;              ///< ticket: what it held before is gone
    uint64_t last_use = 0;
    MemoryUses uses{};
  };
  struct StoredLayer {
    uint32_t holds = 0;
    uint64_t ready = 0;    ///< ticket: brought
    uint64_t updated = 0;  ///< steps whose update it has, or will have when queued work is done
    Gradient gradient;
    MemoryUses uses;             ///< of the home that the device's memory is
    std::vector<void*> streams;  ///< of those that hold it
  };

  const RegisteredLayer& checked_layer(uint32_t layer) const;
  bool in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }
  /// Weights are read in a slot of the ring.
  bool needs_slot(uint32_t stored) const;
  uint64_t weight_bytes(uint32_t stored) const;
  const std::byte* weights(uint32_t stored);
  bool is_behind(uint32_t stored) const;

  /// Queues what brings stored layers, evicting none of `keep`. False, and nothing done, when the
  /// ring has no room.
  bool bring(std::span<const uint32_t> stored, std::span<const uint32_t> keep, bool ahead);
  bool has_room(std::span<const uint32_t> stored, std::span<const uint32_t> keep, size_t spare);
  void evict(WeightRing::Entry& victim);
  void prefetch_next();
  void end_use(MemoryUses& uses, void* stream);
  void call_gpu(const std::function<void()>& call);
  StreamPoints take_uses(uint32_t stored, MemoryUses& uses);
  void note_deviation(uint32_t layer, uint32_t expected);
  /// Queues the pending update of a layer that nothing has brought in this step.
  void catch_up(uint32_t stored);
  void choose_place(uint32_t stored, PagerWork& work);
  void leave_stale(WeightRing::Entry& entry);

  void require_gradient(uint32_t stored, const std::string& name) const;
  uint32_t expected_count(uint32_t stored, uint32_t tensor) const;
  void require_count(uint32_t stored, uint32_t tensor) const;
  void work_on_sums(Lock& lock, uint32_t stored, const std::function<void()>& work);
  void begin_adding(Lock& lock, uint32_t stored, void* stream, const std::function<void()>& check);
  void take_slot(Lock& lock, uint32_t stored, void* stream);
  void clear_sums(uint32_t stored, bool paged, void* stream);
  void finish_incomplete(Lock& lock, uint32_t stored);
  SumSlot& slot_for_sums(uint32_t stored);
  SumSlot& slot_of(uint32_t stored);
  void add_tensor(uint32_t stored, uint32_t tensor, bool first, const TensorValues& gradient,
                  void* stream);
  void end_adding(Lock& lock, uint32_t stored);
  bool all_there(uint32_t stored) const;
  void complete_gradient(uint32_t stored);

  void wait_for_adding(Lock& lock);
  void drop_gradients();
  void check_rates(const StepRates& rates) const;
  void require_all_released(const char* call) const;
  /// With all layers released: nothing is queued, and all updates are applied.
  void settle(Lock& lock, const char* call);
  void forget_weights();
  void require_weights() const;
  void draw_weights(uint64_t seed, double deviation);
  void set_weights(const std::function<void()>& task);
  StreamPoints all_uses();
  const LayerTensor& checked_tensor(const std::string& name, uint64_t count, uint32_t* layer) const;

  LayerRegistry registry_;
  const TrainConfig config_;
  const Ranks& ranks_;
  const Options options_;
  const std::unique_ptr<StateMath> state_;
  Layout layout_;
  PageStore store_;
  CudaDevice* const gpu_;
  const std::unique_ptr<GpuGroups> gpu_groups_;  ///< of several ranks with GPUs

  mutable std::mutex mutex_;
  std::condition_variable sums_free_;
  AccessOrder order_;
  WeightRing ring_;
  uint32_t slot_layers_ = 0;  ///< that need a slot of the ring
  std::vector<StoredLayer> stored_;
  std::vector<char> acquired_;  ///< by registered layer
  std::vector<SumSlot> sum_slots_;
  uint64_t sum_clock_ = 0;
  uint64_t steps_ = 0;    ///< osp_step calls since weights were set
  uint64_t decided_ = 0;  ///< ticket of the last step; 0: none
  bool begun_ = false;    ///< in_backward
  bool weights_set_ = false;
  AccessCounts counts_;
  std::set<uint32_t> told_;  ///< layers that have deviated
  std::string user_state_;
  uint64_t saved_ = 0;  ///< ticket of the checkpoint
  std::exception_ptr save_error_;
  PagerThread thread_;
};

}  // namespace overspill
