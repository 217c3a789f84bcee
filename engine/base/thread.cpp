// Affinity through pthreads: up to CPU_SETSIZE (1024) CPUs, as glibc's cpu_set_t has them.
#include "engine/base/thread.h"

namespace overspill {

CpuBinding::CpuBinding(std::span<const uint32_t> cpus) {
  if (cpus.empty()) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const uint32_t cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &wanted);
  }
  if (pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) != 0) return;
  bound_ = CPU_EQUAL(&before_, &wanted);
  if (bound_) return;
  bound_ = changed_ = pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted) == 0;
}

CpuBinding::~CpuBinding() {
  if (changed_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
}

}  // namespace overspill
