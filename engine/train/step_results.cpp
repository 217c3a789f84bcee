// One gather a step.
#include "engine/train/step_results.h"

#include <numeric>

#include "engine/base/random.h"
#include "engine/program/program.h"

namespace overspill {

double StepResults::loss_sum() const { return std::accumulate(losses.begin(), losses.end(), 0.0); }

double StepResults::square_sum() const {
  return std::accumulate(gradient_squares.begin(), gradient_squares.end(), 0.0);
}

StepResults share_results(const StepContext& context, bool stop, const Ranks& ranks) {
  const size_t losses = context.losses.size(), layers = context.gradient_squares.size();
  std::vector<double> own = context.losses;
  own.insert(own.end(), context.gradient_squares.begin(), context.gradient_squares.end());
  own.push_back(context.non_finite ? 1 : 0);
  own.push_back(stop ? 1 : 0);
  const std::vector<double> all = ranks.gather(std::span<const double>(own));
  StepResults results;
  results.gradient_squares.resize(layers);
  const uint32_t owners = ranks.groups().shard->size();  // those of the first copy of the state
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    const double* values = all.data() + rank * own.size();
    results.losses.insert(results.losses.end(), values, values + losses);
    for (size_t l = 0; rank < owners && l < layers; ++l) {
      results.gradient_squares[l] += values[losses + l];
    }
    results.non_finite |= values[losses + layers] > 0;
    results.stop |= values[losses + layers + 1] > 0;
  }
  return results;
}

void require_same_collectives(const Program& program, const Ranks& ranks) {
  uint64_t hash = 0;
  for (const Op& op : program.ops) {
    if (op.lane != Lane::collective) continue;
    hash = mix64(hash ^ mix64(static_cast<uint64_t>(op.kind) << 32 | op.layer) ^ op.work);
  }
  const std::vector<uint64_t> hashes = ranks.gather(hash);
  for (uint32_t rank = 1; rank < ranks.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    fail(ErrorCode::internal,
         "rank {} plans other collectives than rank 0 (forward {}, backward {}, pending update {}, "
         "{} "
         "micro-batches here); this is a bug, please report it with both ranks' settings",
         rank, program.kind.forward, program.kind.backward, program.kind.pending_update,
         program.kind.micro_batches);
  }
}

}  // namespace overspill
