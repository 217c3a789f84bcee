// Threads by name and by place. Each call acts on the calling thread only.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <cstdint>
#include <cstring>
#include <span>

namespace overspill {

/// Names the calling thread as debuggers and top show it; at most 15 characters are kept.
inline void set_thread_name(const char* name) {
  char kept[16] = {};
  std::strncpy(kept, name, sizeof kept - 1);
  pthread_setname_np(pthread_self(), kept);
}

/// Keeps the calling thread, and threads that it starts meanwhile, on the CPUs; the destructor, on
/// the same thread, gives back what it had. No CPUs, or CPUs that the system refuses: no change.
class CpuBinding {
 public:
  explicit CpuBinding(std::span<const uint32_t> cpus);
  ~CpuBinding();
  CpuBinding(const CpuBinding&) = delete;
  CpuBinding& operator=(const CpuBinding&) = delete;
  /// Whether the thread is on the CPUs that were asked for.
  bool bound() const { return bound_; }

 private:
  cpu_set_t before_;
  bool bound_ = false, changed_ = false;
};

}  // namespace overspill
