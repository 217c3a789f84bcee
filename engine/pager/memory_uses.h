// Where the program's streams stand with a piece of a GPU's memory. Work that uses the memory is
// put on streams and returns at once; whoever overwrites the memory begins behind it. On the host
// calls return when they are done, and there is nothing to know. One thread at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "offload/cuda_device.h"

namespace overspill {

/// Points in streams' work.
using StreamPoints = std::vector<std::unique_ptr<DeviceEvent>>;

class MemoryUses {
 public:
  /// What is put on the stream from now on begins behind all uses so far. `gpu`: null on the host.
  void begin_on(CudaDevice* gpu, void* stream);
  /// A use ends with what is on the stream now.
  void end_on(CudaDevice* gpu, void* stream);
  /// Where they end, for whoever overwrites the memory; it forgets them.
  StreamPoints take();

 private:
  struct Use {
    void* stream;
    std::unique_ptr<DeviceEvent> end;
  };
  std::vector<Use> uses_;  ///< one a stream
};

/// Throws MisuseError, naming what lies there, for memory that the GPU cannot use. `gpu`: null on
/// the host, which can use all.
void require_reachable(CudaDevice* gpu, const void* memory, const std::string& what);

/// Adds the second to the first.
void append(StreamPoints& points, StreamPoints more);

}  // namespace overspill
