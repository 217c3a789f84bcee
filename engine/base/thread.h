// Named threads.
#pragma once

#include <pthread.h>

#include <cstring>

namespace overspill {

/// Names the calling thread as debuggers and top show it; at most 15 characters are kept.
inline void set_thread_name(const char* name) {
  char kept[16] = {};
  std::strncpy(kept, name, sizeof kept - 1);
  pthread_setname_np(pthread_self(), kept);
}

}  // namespace overspill
