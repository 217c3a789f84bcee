// Runs suites of the engine on an emulated GPU: NVIDIA's libraries are their fakes, and kernels go
// to the fake runtime's streams.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "engine/base/error.h"
#include "tests/contract/devices.h"
#include "tests/emulation/emulation.h"
#include "tests/emulation/fake_cublaslt.h"
#include "tests/emulation/fake_cudnn.h"
#include "tests/emulation/fake_nccl.h"

namespace {

using Task = void (*)(void*);
using Put = void(void* stream, Task task, void* argument);

template <class F>
F* ask(const char* library, const char* name) {
  void* const opened = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  CHECK(opened != nullptr);
  auto* const function = reinterpret_cast<F*>(dlsym(opened, name));
  CHECK(function != nullptr);
  return function;
}

Put* put_on_stream = nullptr;

void put_kernel(cudaStream_t stream, Task task, void* argument) {
  put_on_stream(stream, task, argument);
}

/// What a kernel did wrong fails the test in which it ran.
class KernelErrors : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo&) override {
    for (const std::string& error : overspill::emulation::take_errors()) ADD_FAILURE() << error;
    const char* const misuse = ask<const char*()>(OVERSPILL_FAKE_CUDART, "fake_cuda_take_misuse")();
    if (misuse != nullptr) ADD_FAILURE() << misuse;
  }
};

}  // namespace

bool overspill::test::gpu_under_test() { return true; }

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  setenv("OVERSPILL_CUDART", OVERSPILL_FAKE_CUDART, 0);
  setenv("OVERSPILL_CUBLASLT_LIBRARY", OVERSPILL_FAKE_CUBLASLT, 0);
  setenv("OVERSPILL_CUDNN_LIBRARY", OVERSPILL_FAKE_CUDNN, 0);
  setenv("OVERSPILL_NCCL_LIBRARY", OVERSPILL_FAKE_NCCL, 0);
  setenv("OVERSPILL_FAKE_CUDA_DEVICES", "4", 0);
  setenv("OVERSPILL_FAKE_CUDA_DELAY_US", "20", 0);  // what is not ordered comes in another order
  put_on_stream = ask<Put>(OVERSPILL_FAKE_CUDART, "fake_cuda_enqueue");
  ask<void(Put*)>(OVERSPILL_FAKE_CUBLASLT, "fake_cublaslt_set_enqueue")(put_on_stream);
  ask<void(Put*)>(OVERSPILL_FAKE_CUDNN, "fake_cudnn_set_enqueue")(put_on_stream);
  ask<void(Put*)>(OVERSPILL_FAKE_NCCL, "fake_nccl_set_enqueue")(put_on_stream);
  overspill::emulation::set_enqueue(put_kernel);
  testing::UnitTest::GetInstance()->listeners().Append(new KernelErrors);
  return RUN_ALL_TESTS();
}
