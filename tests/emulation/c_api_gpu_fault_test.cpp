// The C API with GPUs: what programs do wrong, what they must find unchanged, and a GPU that is
// lost.
#include <optional>
#include <thread>

#include "tests/emulation/c_api_gpu.h"

namespace overspill {
namespace {

using namespace test;

TEST_F(CApiGpu, MisuseIsNamedAndChangesNothing) {
  const auto refused = [&](const char* device, const char* offload, osp_status_t status,
                           const char* part) {
    const osp_engine_options_t options = on(device);
    osp_engine_t engine = nullptr;
    OSP_EXPECT(status, osp_engine_create(configuration("", offload).c_str(), &options, &engine));
    EXPECT_EQ(engine, nullptr);
    EXPECT_NE(std::string(osp_last_error()).find(part), std::string::npos) << osp_last_error();
  };
  refused("cuda:4", "", OSP_ERROR_INVALID_ARGUMENT, "CUDA shows 4 GPUs");
  refused("cuda:x", "", OSP_ERROR_INVALID_ARGUMENT, "accepted: host, cuda, cuda:N");
  refused("gpu", "", OSP_ERROR_INVALID_ARGUMENT, "accepted: host, cuda, cuda:N");
  refused("host", "  device: cuda\n", OSP_ERROR_INVALID_CONFIG, "remove one of them");
  refused("cuda:0", "  device: unified\n", OSP_ERROR_INVALID_CONFIG, "remove one of them");

  ProgramGpu gpu(0);
  const osp_engine_t host = make(configuration(), on("host"));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_acquire(host, 0, gpu.stream(0), nullptr, 0));
  OSP_OK(osp_engine_destroy(host));

  const osp_engine_t engine = make(configuration("", "  device: cuda\n"), on(nullptr));
  const std::vector<float> before = read_all(engine), values = gradient(1, 64 * 192);
  OSP_EXPECT(
      OSP_ERROR_INVALID_ARGUMENT,
      osp_submit_gradient(engine, 1, 0, values.data(), OSP_FLOAT32, values.size(), gpu.stream(0)));
  EXPECT_NE(std::string(osp_last_error()).find("GPU 0 does not reach"), std::string::npos);
  osp_activation_t activation = 0;
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT,
             osp_activation_save(engine, values.data(), 64, gpu.stream(0), &activation));
  EXPECT_EQ(before, read_all(engine));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiGpu, LeavesTheThreadItsGpuAndTakesNoMemoryAfterTheStart) {
  const auto set_device = fake_cuda<int(int)>("cudaSetDevice");
  const auto get_device = fake_cuda<int(int*)>("cudaGetDevice");
  std::optional<ProgramGpu> first(std::in_place, 1), second(std::in_place, 3);
  ASSERT_EQ(set_device(2), 0);
  const osp_engine_t one = make(configuration(), on("cuda:1"));
  const osp_engine_t three = make(configuration(), on("cuda:3"));
  void* memory = nullptr;
  OSP_OK(osp_memory_allocate(one, 5000, -1, &memory));
  EXPECT_EQ(FAKE_CUDA(fake_cuda_memory)(memory, 5000), kFakeCudaPinned);
  int now = -1;
  EXPECT_EQ(get_device(&now), 0);
  EXPECT_EQ(now, 2);

  const FakeCudaLive before = FAKE_CUDA(fake_cuda_live)();
  std::thread other([&] { train(three, &*second, 1, 2, 1, false); });
  train(one, &*first, 1, 2, 1, false);
  other.join();
  const FakeCudaLive after = FAKE_CUDA(fake_cuda_live)();
  EXPECT_EQ(before.allocations, after.allocations);
  EXPECT_EQ(before.registrations, after.registrations);
  EXPECT_EQ(before.streams, after.streams);
  EXPECT_TRUE(same_bits(read_all(one), read_all(three)));
  OSP_OK(osp_memory_free(one, memory));
  OSP_OK(osp_engine_destroy(one));
  OSP_OK(osp_engine_destroy(three));
  first.reset();
  second.reset();
  expect_nothing_left();
}

/// Up to the first call that fails.
osp_status_t step_of_zeros(osp_engine_t engine, const void* zeros, void* stream) {
  const auto use = [&](uint32_t layer) {
    const osp_status_t status = osp_acquire(engine, layer, stream, nullptr, 0);
    return status != OSP_SUCCESS ? status : osp_release(engine, layer, stream);
  };
  osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
  options.learning_rate = 1e-2;
  for (uint32_t l = 0; l < 3; ++l) {
    if (const osp_status_t status = use(l)) return status;
  }
  for (uint32_t l = 3; l-- > 0;) {
    if (const osp_status_t status = use(l)) return status;
    const auto& tensors = small_layers()[l];
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].frozen) continue;
      const osp_status_t status =
          osp_submit_gradient(engine, l, t, zeros, OSP_FLOAT32, tensors[t].count(), stream);
      if (status != OSP_SUCCESS) return status;
    }
  }
  return osp_step(engine, &options);
}

TEST_F(CApiGpu, ALostGpuEndsEveryCallWithOneError) {
  constexpr int kIllegalAddress = 700;
  for (const int work : {3, 40, 90}) {
    SCOPED_TRACE(work);
    {
      ProgramGpu gpu(0);
      const osp_engine_t engine = make(configuration(), on("cuda:0"));
      ASSERT_NE(engine, nullptr);
      std::byte* const zeros = gpu.take(64 * 192 * sizeof(float));
      gpu.device().zero_on(gpu.stream(0), zeros, 64 * 192 * sizeof(float));
      gpu.reset();
      FAKE_CUDA(fake_cuda_break_device)(0, kIllegalAddress, work);
      osp_status_t status = OSP_SUCCESS;
      for (int step = 0; step < 20 && status == OSP_SUCCESS; ++step) {
        status = step_of_zeros(engine, zeros, gpu.stream(0));
      }
      EXPECT_EQ(status, OSP_ERROR_IO);
      const std::string message = osp_last_error();
      EXPECT_NE(message.find("cudaErrorIllegalAddress"), std::string::npos) << message;
      OSP_EXPECT(OSP_ERROR_IO, osp_acquire(engine, 0, nullptr, nullptr, 0));
      EXPECT_EQ(osp_last_error(), message);
      OSP_EXPECT(OSP_ERROR_IO, osp_engine_destroy(engine));
    }
    expect_nothing_left();
    configure_fake(20);
  }
}

}  // namespace
}  // namespace overspill
