// Attention's graphs against float64, on the fake cuDNN or, on a GPU, on NVIDIA's own; what is
// refused, and how it is told.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/model/cuda_dnn_attention.h"
#include "tests/emulation/attention_reference.h"
#include "tests/emulation/fake_cudnn.h"
#include "tests/emulation/test_tensor.h"
#include "tests/unit/engine/model/random_documents.h"

namespace overspill::cuda {
namespace {

class DnnBase : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kOnGpu) setenv("OVERSPILL_CUDNN_LIBRARY", OVERSPILL_FAKE_CUDNN, 1);
    std::string refusal;
    library_ = open_dnn_library(refusal);
    if (test::kOnGpu && !library_) GTEST_SKIP() << refusal;
    ASSERT_TRUE(library_) << refusal;
  }

  std::optional<DnnLibrary> library_;
};

/// With the fake's own functions, which make it fail and show what it was asked.
class Dnn : public DnnBase {
 protected:
  void SetUp() override {
    if (test::kOnGpu) GTEST_SKIP() << "only the fake cuDNN can be told to fail";
    DnnBase::SetUp();
    fake_ = dlopen(OVERSPILL_FAKE_CUDNN, RTLD_NOW);
    ASSERT_NE(fake_, nullptr);
  }
  void TearDown() override {
    if (!fake_) return;
    ask<void(int)>("fake_cudnn_refuse_plans")(0);
    ask<void(int64_t)>("fake_cudnn_set_workspace")(1024);
    ask<void(FakeCudnnEnqueue)>("fake_cudnn_set_enqueue")(nullptr);
    EXPECT_EQ(ask<int()>("fake_cudnn_live_objects")(), 0);
  }
  template <class F>
  F* ask(const char* name) {
    return reinterpret_cast<F*>(dlsym(fake_, name));
  }

  void* fake_ = nullptr;
};

/// Random inputs, poisoned outputs, workspaces of exactly the size that the plans ask for.
struct Case {
  Case(const AttentionShape& shape, const DnnAttention& attention, uint32_t seed)
      : queries(shape.batch * shape.sequence_len * shape.heads * shape.head_dim),
        keys(shape.batch * shape.sequence_len * shape.kv_heads * shape.head_dim),
        q(TestTensor::random(DType::bf16, queries, seed)),
        k(TestTensor::random(DType::bf16, keys, seed + 1)),
        v(TestTensor::random(DType::bf16, keys, seed + 2)),
        d_o(TestTensor::random(DType::bf16, queries, seed + 3)),
        o(DType::bf16, queries),
        dq(DType::bf16, queries),
        dk(DType::bf16, keys),
        dv(DType::bf16, keys),
        lse(DType::f32, shape.batch * shape.heads * shape.sequence_len),
        begins(test::random_documents(shape, seed, 20)),
        ends(test::document_ends(shape, begins)),
        forward_workspace(DType::f32, attention.forward_workspace_bytes() / sizeof(float)),
        backward_workspace(DType::f32, attention.backward_workspace_bytes() / sizeof(float)) {}

  void run(const DnnHandle& handle, const DnnAttention& attention) {
    const DnnAttentionInput input{q.get(), k.get(), v.get(), ends.data()};
    attention.forward(handle, input, o.get(), lse.floats(), forward_workspace.get());
    attention.backward(handle, input,
                       {o.get(), d_o.get(), lse.floats(), dq.get(), dk.get(), dv.get()},
                       backward_workspace.get());
  }

  uint64_t queries, keys;
  TestTensor q, k, v, d_o, o, dq, dk, dv, lse;
  std::vector<int32_t> begins, ends;
  TestTensor forward_workspace, backward_workspace;
};

double largest(const std::vector<double>& values) {
  double most = 0.0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

/// Within `relative` of the largest value: what rounding a tensor, or the weights that it is summed
/// with, to bf16 may do. Gradients that cancel to nothing keep float32's rounding.
void expect_near(const TestTensor& result, const std::vector<double>& expected, double relative,
                 double least = 1e-3) {
  ASSERT_EQ(result.size(), expected.size());
  const double bound = relative * std::max(largest(expected), least);
  for (uint64_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(result[i], expected[i], bound) << "element " << i;
  }
}

void expect_near(const Case& result, const AttentionReference& expected) {
  {
    SCOPED_TRACE("o");
    expect_near(result.o, expected.o, 0x1p-7);
  }
  {
    SCOPED_TRACE("lse");
    // NVIDIA's exponentials are approximate. A logarithm's error does not shrink with it.
    expect_near(result.lse, expected.lse, test::kOnGpu ? 0x1p-14 : 0x1p-20, 1.0);
  }
  {
    SCOPED_TRACE("dq");
    expect_near(result.dq, expected.dq, 0x1p-7);
  }
  {
    SCOPED_TRACE("dk");
    expect_near(result.dk, expected.dk, 0x1p-6);
  }
  SCOPED_TRACE("dv");
  expect_near(result.dv, expected.dv, 0x1p-6);
}

struct Setting {
  const char* name;
  AttentionShape shape;
  DnnAttentionOptions options;
  uint64_t parts = 1;
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class DnnAttentions : public DnnBase, public testing::WithParamInterface<Setting> {};

TEST_P(DnnAttentions, MatchFloat64) {
  const Setting& setting = GetParam();
  const DnnHandle handle(*library_);
  std::string refusal;
  const auto attention =
      DnnAttention::make(DnnTarget(handle), setting.shape, setting.options, refusal);
  if (test::kOnGpu && !attention) GTEST_SKIP() << "the portable kernel is used: " << refusal;
  ASSERT_TRUE(attention) << refusal;
  if (!test::kOnGpu) {
    EXPECT_EQ(attention->backward_parts(), setting.parts);
  }
  EXPECT_LE(attention->backward_workspace_bytes(), setting.options.most_workspace_bytes);
  for (const uint32_t seed : {1u, 100u, 1000u}) {
    Case test(setting.shape, *attention, seed);
    test.run(handle, *attention);
    const bool documents = setting.options.documents;
    expect_near(test, reference_attention(setting.shape, setting.options.window,
                                          documents ? test.begins : std::vector<int32_t>(), test.q,
                                          test.k, test.v, test.d_o));
  }
}

constexpr uint64_t kMuch = uint64_t{1} << 30;

const Setting kSettings[] = {
    {"one_token", {1, 1, 2, 1, 64}, {}},
    {"one_head", {1, 37, 1, 1, 64}, {}},
    {"head_64", {2, 33, 6, 2, 64}, {}},
    {"head_80", {1, 40, 4, 4, 80}, {}},
    {"head_96", {1, 40, 4, 2, 96}, {}},
    {"head_128", {2, 24, 8, 2, 128}, {}},
    {"one_key_head", {2, 21, 5, 1, 64}, {}},
    {"any_order", {2, 33, 6, 2, 64}, {.deterministic = false}},
    {"any_order_no_groups", {2, 33, 3, 3, 64}, {.deterministic = false}},
    {"window", {2, 33, 6, 2, 64}, {.window = 7}},
    {"window_of_one", {1, 9, 2, 2, 64}, {.window = 1}},
    {"window_of_all", {1, 9, 2, 2, 64}, {.window = 9}},
    {"window_any_order", {1, 33, 4, 2, 64}, {.window = 16, .deterministic = false}},
    {"documents", {2, 65, 6, 2, 64}, {.documents = true}},
    {"documents_any_order", {2, 33, 3, 3, 64}, {.documents = true, .deterministic = false}},
    {"documents_in_a_window", {2, 33, 6, 2, 64}, {.window = 7, .documents = true}},
    {"documents_in_parts",
     {2, 128, 4, 2, 64},
     {.documents = true, .most_workspace_bytes = 140 << 10},
     2},
    // 4 heads of 2 sequences: row sums of 512 bytes a head, scores of 32 KiB, 1 KiB of the plan.
    {"parts_of_batch", {2, 128, 4, 2, 64}, {.most_workspace_bytes = 140 << 10}, 2},
    {"parts_of_heads", {2, 128, 4, 2, 64}, {.most_workspace_bytes = 70 << 10}, 4}};

INSTANTIATE_TEST_SUITE_P(Shapes, DnnAttentions, testing::ValuesIn(kSettings),
                         [](const auto& test) { return test.param.name; });

TEST_F(DnnBase, RepeatsBitForBit) {
  const AttentionShape shape{2, 128, 4, 2, 64};
  const DnnHandle handle(*library_);
  std::string refusal;
  const auto attention = DnnAttention::make(DnnTarget(handle), shape, {}, refusal);
  if (test::kOnGpu && !attention) GTEST_SKIP() << "the portable kernel is used: " << refusal;
  ASSERT_TRUE(attention) << refusal;
  Case first(shape, *attention, 1), second(shape, *attention, 1);
  first.run(handle, *attention);
  second.run(handle, *attention);
  EXPECT_TRUE(first.o.same_bits(second.o));
  EXPECT_TRUE(first.dq.same_bits(second.dq));
  EXPECT_TRUE(first.dk.same_bits(second.dk));
  EXPECT_TRUE(first.dv.same_bits(second.dv));
}

TEST_F(Dnn, RepeatsBitForBitInPartsToo) {
  const AttentionShape shape{2, 128, 4, 2, 64};
  const DnnHandle handle(*library_);
  std::string refusal;
  const auto whole =
      DnnAttention::make(DnnTarget(handle), shape, {.most_workspace_bytes = kMuch}, refusal);
  const auto parts =
      DnnAttention::make(DnnTarget(handle), shape, {.most_workspace_bytes = 70 << 10}, refusal);
  ASSERT_TRUE(whole && parts) << refusal;
  Case first(shape, *whole, 1), second(shape, *parts, 1);
  first.run(handle, *whole);
  second.run(handle, *parts);
  EXPECT_TRUE(first.dq.same_bits(second.dq));
  EXPECT_TRUE(first.dk.same_bits(second.dk));
  EXPECT_TRUE(first.dv.same_bits(second.dv));
}

std::string refusal_of(const DnnHandle& handle, const AttentionShape& shape,
                       const DnnAttentionOptions& options = {}) {
  std::string refusal;
  return DnnAttention::make(DnnTarget(handle), shape, options, refusal) ? "" : refusal;
}

TEST_F(Dnn, SaysWhyThereIsNoPlan) {
  const DnnHandle handle(*library_);
  EXPECT_EQ(refusal_of(handle, {1, 16, 4, 2, 20}),
            "heads of 20 values are not aligned to 16 bytes");
  EXPECT_EQ(refusal_of(handle, {1, 16, 4, 3, 64}),
            "4 heads over 3 key heads, 1 sequences of 16 tokens are no attention");
  EXPECT_EQ(refusal_of(handle, {1, 128, 4, 4, 64}, {.most_workspace_bytes = 20 << 10}),
            "backward needs more than the 20480 bytes of workspace that it may use");
  ask<void(int64_t)>("fake_cudnn_set_workspace")(1 << 20);
  EXPECT_EQ(refusal_of(handle, {1, 128, 4, 4, 64}, {.most_workspace_bytes = 40 << 10}),
            "the plan needs 1048576 bytes of workspace, 40960 may be used");
  ask<void(int)>("fake_cudnn_refuse_plans")(2);
  EXPECT_EQ(refusal_of(handle, {1, 16, 4, 2, 64}),
            "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN (3001): told to refuse");
}

TEST_F(Dnn, TakesTheNextProposalWhenOneIsRefused) {
  const DnnHandle handle(*library_);
  ask<void(int)>("fake_cudnn_refuse_plans")(1);
  EXPECT_EQ(refusal_of(handle, {1, 16, 4, 2, 64}), "");
}

TEST_F(Dnn, APlanForADescribedGpuSaysItsWorkspace) {
  std::string refusal;
  const auto attention =
      DnnAttention::make(DnnTarget(*library_, "{}"), {1, 16, 4, 2, 64}, {}, refusal);
  ASSERT_TRUE(attention) << refusal;
  EXPECT_EQ(attention->forward_workspace_bytes(), 1024u);
  EXPECT_EQ(attention->backward_workspace_bytes(), 4 * 16 * sizeof(float) + 1024u);
}

std::vector<std::pair<void (*)(void*), void*>> queued;

TEST_F(Dnn, ExecutionsAreOnTheStream) {
  const AttentionShape shape{1, 8, 2, 1, 64};
  const DnnHandle handle(*library_);
  std::string refusal;
  const auto attention = DnnAttention::make(DnnTarget(handle), shape, {}, refusal);
  ASSERT_TRUE(attention) << refusal;
  queued.clear();
  ask<void(FakeCudnnEnqueue)>("fake_cudnn_set_enqueue")(
      [](void* stream, void (*task)(void*), void* argument) {
        EXPECT_EQ(stream, reinterpret_cast<void*>(0x51));
        queued.emplace_back(task, argument);
      });
  handle.set_stream(reinterpret_cast<cudaStream_t>(0x51));
  Case test(shape, *attention, 1);
  test.run(handle, *attention);
  ASSERT_EQ(queued.size(), 2u);
  EXPECT_TRUE(std::isnan(test.o[0]));
  for (const auto& [task, argument] : queued) task(argument);
  EXPECT_FALSE(std::isnan(test.o[0]));
  EXPECT_FALSE(std::isnan(test.dq[0]));
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error_code_name(error.code())) + ": " + error.what();
  }
  return "no error";
}

TEST_F(Dnn, AFailedExecutionIsNamed) {
  const AttentionShape shape{1, 8, 2, 1, 64};
  const DnnHandle handle(*library_);
  std::string refusal;
  const auto attention = DnnAttention::make(DnnTarget(handle), shape, {}, refusal);
  ASSERT_TRUE(attention) << refusal;
  Case test(shape, *attention, 1);
  ask<void()>("fake_cudnn_fail_execution")();
  EXPECT_EQ(message_of([&] { test.run(handle, *attention); }),
            "io: cuDNN cannot execute a plan: CUDNN_STATUS_EXECUTION_FAILED (5000): told to fail");
}

TEST_F(Dnn, AbsentIsNoErrorUnlessItIsNamed) {
  setenv("OVERSPILL_CUDNN_LIBRARY", "/nowhere/libcudnn.so", 1);
  std::string refusal;
  const std::string named = message_of([&] { open_dnn_library(refusal); });
  EXPECT_NE(named.find("invalid_config: OVERSPILL_CUDNN_LIBRARY=/nowhere/libcudnn.so: cannot open"),
            std::string::npos)
      << named;
  EXPECT_NE(refusal.find("install it"), std::string::npos) << refusal;
  setenv("OVERSPILL_CUDNN_LIBRARY", "libm.so.6", 1);
  const std::string other = message_of([&] { open_dnn_library(refusal); });
  EXPECT_NE(other.find("invalid_config: libm.so.6 has no function cudnnGetVersion"),
            std::string::npos)
      << other;
}

}  // namespace
}  // namespace overspill::cuda
