// A Program is the list of operations of one training step, as data: lanes, dependencies, and the
// slots and pages each op touches. It holds indices, never pointers, and is immutable once planned.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace overspill {

enum class Lane : uint8_t { nvme_read, nvme_write, h2d, d2h, compute, collective, optimizer };
inline constexpr size_t kLanes = 7;
const char* lane_name(Lane lane);

enum class Tier : uint8_t { device, host, nvme };
const char* tier_name(Tier tier);

struct PageId {
  uint32_t value = UINT32_MAX;
  bool operator==(const PageId&) const = default;
};
struct SlotId {
  uint32_t value = UINT32_MAX;
  bool operator==(const SlotId&) const = default;
};
struct OpId {
  uint32_t value = UINT32_MAX;
  bool valid() const { return value != UINT32_MAX; }
  bool operator==(const OpId&) const = default;
};

enum class PageKind : uint8_t {
  weight,               ///< a chunk's weights: bf16, or the float32 masters
  peer_weight,          ///< the other ranks' weights of a layer, before or behind this rank's;
                        ///< gathered, never stored
  optimizer,            ///< a chunk's [remainder int16 |] exp_avg | exp_avg_sq
  gradient,             ///< a chunk's gradient as it leaves the device
  gradient_sum,         ///< a layer's float32 accumulator; lives on the device only
  activation,           ///< the input of a layer for one micro-batch
  activation_gradient,  ///< the gradient at the current layer boundary for one micro-batch
};

/// Where a unit of state lives between the steps, and how large it is.
struct Page {
  PageKind kind;
  uint32_t layer;
  uint32_t index;  ///< chunk in the layer, or micro-batch
  Tier home;
  uint64_t bytes;
  SlotId home_slot;          ///< when home is device or host
  uint64_t home_offset = 0;  ///< in the home slot, or in the volume
};

/// A fixed piece of the device's or the host's arena.
struct Slot {
  Tier memory;      ///< device or host
  uint64_t offset;  ///< in the arena
  uint64_t bytes;
  const char* role;  ///< "weights", "stage", ...: stable text for dumps
};

enum class OpKind : uint8_t {
  read,   ///< NVMe pages -> slots
  write,  ///< slots -> NVMe pages
  copy_to_device,
  copy_to_host,
  forward,  ///< one layer, one micro-batch
  loss,     ///< the head's forward and backward, one micro-batch
  score,    ///< the head's forward only, for evaluation
  backward,
  reduce_gradient,  ///< the layer's sum of squares, in fp64
  export_gradient,  ///< a chunk's float32 sums -> the gradient's page
  update,           ///< the optimizer on one chunk
  all_gather,       ///< every rank's part of a layer's weights -> all of them
  reduce_scatter,   ///< a layer's gradients, summed over the ranks -> this rank's part
  all_reduce,       ///< this rank's part of them, summed over the replicas
  agree,            ///< what the ranks found in their parts of a layer's gradients, put together
};
const char* op_name(OpKind kind);

enum class AccessMode : uint8_t { read, write, update };

/// One contiguous range of a slot holding consecutive pages [page, page + page_count).
struct Access {
  SlotId slot;
  uint64_t offset;
  uint64_t bytes;
  PageId page;
  uint32_t page_count = 1;
  AccessMode mode = AccessMode::read;
};

struct Op {
  OpKind kind;
  Lane lane;
  uint32_t layer = 0;
  uint32_t index = 0;  ///< micro-batch, or chunk
  uint64_t work = 0;   ///< bytes moved, FLOPs, or parameters updated
  uint32_t first_access = 0, access_count = 0;
  uint32_t first_dep = 0, dep_count = 0;
};

/// What a step's Program is asked to do.
struct StepKind {
  bool forward = true;
  bool backward = true;         ///< loss with gradients; else evaluation
  bool pending_update = false;  ///< the last step's update has yet to be applied
  bool moments_zero = false;    ///< no update has been applied yet: moments are not read
  uint32_t micro_batches = 1;
  bool operator==(const StepKind&) const = default;
};

struct Program {
  StepKind kind;
  std::vector<Op> ops;
  std::vector<Access> accesses;
  std::vector<OpId> deps;

  std::span<const Access> accesses_of(const Op& op) const {
    return {accesses.data() + op.first_access, op.access_count};
  }
  std::span<const OpId> deps_of(const Op& op) const {
    return {deps.data() + op.first_dep, op.dep_count};
  }
  /// Bytes that cross a transfer lane.
  uint64_t lane_bytes(Lane lane) const;
};

/// For each op and lane, the number of that lane's ops known to have finished when the op starts
/// (through lane order and dependencies). op b follows op a when clock[b][lane(a)] > position(a).
struct HappensBefore {
  explicit HappensBefore(const Program& program);
  bool ordered(OpId before, OpId after) const;

  std::vector<std::array<uint32_t, kLanes>> clock;
  std::vector<uint32_t> position;  ///< of each op in its lane
  std::vector<Lane> lane;
};

}  // namespace overspill
