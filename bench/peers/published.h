// Step times that other systems published, and the same steps by the simulator: under the peer's
// schedule and under Overspill's, on the same hardware. Pure functions of a profile.
#pragma once

#include <span>

#include "bench/peers/schedules.h"
#include "engine/plan/profile.h"

namespace overspill {

/// Phases of a DeepSpeed step, as its timers delimit them.
struct PhaseSeconds {
  double forward = 0, backward = 0, update = 0;
  double total() const { return forward + backward + update; }
};

/// DeepSpeed ZeRO-3 with the optimizer on one NVMe mount, 4 GPUs, one sequence of 2048 tokens each
/// (MLP-Offload's artifact: scripts/parse-res.py, scripts/launch-expt.sh, logs/). 4 KV heads and a
/// vocabulary of 50304.
struct DeepSpeedRow {
  const char* name;
  uint32_t layers, hidden, ffn, heads;
  double parameters;       ///< as published
  uint32_t buffers;        ///< buffer_count in the row's log
  uint64_t largest_group;  ///< parameters, in the row's log
  PhaseSeconds published;
};
std::span<const DeepSpeedRow> deepspeed_rows();
/// Model and batch, for one rank.
Layout deepspeed_layout(const DeepSpeedRow& row);

/// LoHan, 13 billion parameters, 32 sequences of 1024 tokens, by number of drives.
struct LohanRow {
  uint32_t drives;
  double tflops;  ///< published; of the model: recomputation is not counted
};
std::span<const LohanRow> lohan_rows();
Layout lohan_layout();
/// The peer's hardware with so many of its drives.
HardwareProfile with_drives(HardwareProfile hardware, uint32_t count);

PhaseSeconds simulate_deepspeed(const HardwareProfile& hardware, const DeepSpeedRow& row);
/// Seconds of a step with all of the profile's drives.
double simulate_lohan(const HardwareProfile& hardware);
/// The model's TFLOPS of a step of so many seconds.
double lohan_tflops(double seconds);

/// Seconds of a step of the same model and batch under Overspill's schedule.
struct OverspillSeconds {
  double spilled = 0;    ///< what the peer keeps on NVMe is there
  double automatic = 0;  ///< memory is used where it suffices
};
OverspillSeconds overspill_deepspeed(const HardwareProfile& hardware, const DeepSpeedRow& row);
OverspillSeconds overspill_lohan(const HardwareProfile& hardware);

}  // namespace overspill
