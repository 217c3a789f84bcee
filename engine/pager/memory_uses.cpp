// One event a stream.
#include "engine/pager/memory_uses.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/pager/misuse.h"

namespace overspill {

void MemoryUses::begin_on(CudaDevice* gpu, void* stream) {
  if (gpu == nullptr) return;
  for (const Use& use : uses_) gpu->wait_on(stream, *use.end);
}

void MemoryUses::end_on(CudaDevice* gpu, void* stream) {
  if (gpu == nullptr) return;
  auto use = std::ranges::find(uses_, stream, &Use::stream);
  if (use == uses_.end()) {
    uses_.push_back({stream, gpu->make_event()});
    use = std::prev(uses_.end());
  } else {
    // The handle may be that of a newer stream than the one that the event was recorded on.
    gpu->wait_on(stream, *use->end);
  }
  gpu->record_on(stream, *use->end);
}

StreamPoints MemoryUses::take() {
  StreamPoints points;
  for (Use& use : std::exchange(uses_, {})) points.push_back(std::move(use.end));
  return points;
}

void require_reachable(CudaDevice* gpu, const void* memory, const std::string& what) {
  if (gpu == nullptr || gpu->reaches(memory)) return;
  refuse(Misuse::bad_argument,
         "{} in memory that GPU {} does not reach; give memory of this GPU, or pinned host memory",
         what, gpu->gpu());
}

void append(StreamPoints& points, StreamPoints more) {
  std::ranges::move(more, std::back_inserter(points));
}

}  // namespace overspill
