// The fake CUDA runtime for tests that reach CUDA as the engine does, by opening it at run time.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/emulation/fake_runtime.h"

#if !defined(OVERSPILL_FAKE_CUDART)
#define OVERSPILL_FAKE_CUDART ""
#endif

namespace overspill::test {

/// Whether the build has the fake: it needs CUDA's headers.
inline bool fake_cuda_is_built() { return std::string(OVERSPILL_FAKE_CUDART) != ""; }

/// A function that the fake adds to CUDA's. Makes the engine open the fake.
template <class F>
F* fake_cuda(const char* name) {
  setenv("OVERSPILL_CUDART", OVERSPILL_FAKE_CUDART, 1);
  void* const library = dlopen(OVERSPILL_FAKE_CUDART, RTLD_NOW);
  EXPECT_NE(library, nullptr) << dlerror();
  return reinterpret_cast<F*>(dlsym(library, name));
}
#define FAKE_CUDA(function) (::overspill::test::fake_cuda<decltype(function)>(#function))

/// Misuses that no test has taken yet, each on a line of its own.
inline std::string take_fake_cuda_misuses() {
  std::string all;
  while (const char* text = FAKE_CUDA(fake_cuda_take_misuse)()) all += std::string(text) + "\n";
  return all;
}

}  // namespace overspill::test
