// Collectives of CPU ranks over Gloo. Every sum is made in the order of ranks, so that a run's bits
// never depend on timing. Bytes that a rank of N sends, for parts of n elements, w bytes each:
//   all_gather          (N-1) * n * w
//   reduce_scatter      (N-1) * n * w              w: 4, or 2 for bf16
//   all_reduce(float)   (n + (N-2) * m) * w        n: all values, m: this rank's of them, that is
//                                                  n / N, and one more for the first n % N ranks
//   all_reduce(double)  (N-1) * n * 8
//   broadcast           children * bytes           a binomial tree: rank v after the root has the
//                                                  children v + 2^k < N with 2^k > v
//   barrier             0
// all_reduce(float, bf16) rounds contributions and sums. A rank that makes no progress with a piece
// (4 MiB at most) for the group's timeout is lost.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/collective/collective.h"
#include "engine/collective/group.h"

namespace overspill {

/// Gloo's thread and the address it listens at; groups of a process share one.
struct GlooDevice;

/// `own_address`: a name or IP address of this host that the other ranks reach. From here on the
/// process ignores SIGPIPE, unless it handles it: a lost rank must not end it silently. Throws
/// Error(rank_lost) where the address is not this host's.
std::shared_ptr<GlooDevice> open_gloo_device(const std::string& own_address);

/// Called on all ranks of the group, for several groups in the same order. Throws Error(rank_lost).
std::unique_ptr<Collective> make_gloo_collective(const CollectiveGroup& group,
                                                 std::shared_ptr<GlooDevice> device);

/// Host memory that a group of so many ranks keeps for its reductions, at most 16 MiB up to 512.
uint64_t gloo_staging_bytes(uint32_t ranks);

}  // namespace overspill
