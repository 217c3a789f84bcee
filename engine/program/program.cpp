// Names, lane totals and the happens-before order of Programs.
#include "engine/program/program.h"

#include <algorithm>

namespace overspill {

const char* lane_name(Lane lane) {
  switch (lane) {
    case Lane::nvme_read: return "nvme_read";
    case Lane::nvme_write: return "nvme_write";
    case Lane::h2d: return "h2d";
    case Lane::d2h: return "d2h";
    case Lane::compute: return "compute";
    case Lane::collective: return "collective";
    case Lane::optimizer: return "optimizer";
  }
  return "?";
}

const char* tier_name(Tier tier) {
  return tier == Tier::device ? "device" : tier == Tier::host ? "host" : "nvme";
}

const char* op_name(OpKind kind) {
  switch (kind) {
    case OpKind::read: return "read";
    case OpKind::write: return "write";
    case OpKind::copy_to_device: return "copy_to_device";
    case OpKind::copy_to_host: return "copy_to_host";
    case OpKind::forward: return "forward";
    case OpKind::loss: return "loss";
    case OpKind::score: return "score";
    case OpKind::backward: return "backward";
    case OpKind::reduce_gradient: return "reduce_gradient";
    case OpKind::export_gradient: return "export_gradient";
    case OpKind::update: return "update";
    case OpKind::all_gather: return "all_gather";
    case OpKind::reduce_scatter: return "reduce_scatter";
    case OpKind::all_reduce: return "all_reduce";
    case OpKind::agree: return "agree";
  }
  return "?";
}

uint64_t Program::lane_bytes(Lane lane) const {
  uint64_t bytes = 0;
  for (const Op& op : ops) {
    if (op.lane == lane) bytes += op.work;
  }
  return bytes;
}

HappensBefore::HappensBefore(const Program& program) {
  std::array<uint32_t, kLanes> next{};
  std::array<OpId, kLanes> previous{};
  for (uint32_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const auto lane_index = static_cast<size_t>(op.lane);
    std::array<uint32_t, kLanes> own{};
    const auto join = [&](OpId before) {
      for (size_t l = 0; l < kLanes; ++l) own[l] = std::max(own[l], clock[before.value][l]);
      const auto from = static_cast<size_t>(lane[before.value]);
      own[from] = std::max(own[from], position[before.value] + 1);
    };
    if (previous[lane_index].valid()) join(previous[lane_index]);
    for (const OpId dep : program.deps_of(op)) {
      if (dep.value < i) join(dep);
    }
    clock.push_back(own);
    position.push_back(next[lane_index]++);
    lane.push_back(op.lane);
    previous[lane_index] = OpId{i};
  }
}

bool HappensBefore::ordered(OpId before, OpId after) const {
  return clock[after.value][static_cast<size_t>(lane[before.value])] > position[before.value];
}

}  // namespace overspill
