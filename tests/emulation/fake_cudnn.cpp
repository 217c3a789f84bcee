// cuDNN's backend API on host memory. Stricter than cuDNN: attributes of a wrong type, descriptors
// used before they are finalized or after they are destroyed, missing, surplus or misaligned
// arguments are errors with a text, and the workspace is overwritten. It takes every graph of the
// operations it knows: which ones the real library can fuse, that library is asked.
#include "tests/emulation/fake_cudnn.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "tests/emulation/fake_cudnn_graph.h"

struct cudnnContext {
  void* stream = nullptr;
};

namespace overspill {
namespace {

constexpr int64_t kProposals = 2;

std::mutex mutex;  // of the objects alive
std::set<const void*> alive;
std::atomic<FakeCudnnEnqueue> enqueue_hook{nullptr};
std::atomic<int64_t> workspace_of_plans{1024};
std::atomic<int> refusals{0}, executions{0};
std::atomic<bool> fails_next{false};
thread_local std::string last_text;

cudnnStatus_t wrong(cudnnStatus_t status, const std::string& text) {
  last_text = text;
  std::fprintf(stderr, "fake cuDNN: %s\n", text.c_str());
  return status;
}
cudnnStatus_t bad(const std::string& text) { return wrong(CUDNN_STATUS_BAD_PARAM, text); }

bool is_alive(const void* object) {
  const std::lock_guard lock(mutex);
  return alive.contains(object);
}

struct Attribute {
  cudnnBackendAttributeType_t type;
  std::vector<std::byte> bytes;
};

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  bool finalized = false;
  std::map<cudnnBackendAttributeName_t, Attribute> attributes{};
  FakeProgram program{};             // of a graph, proposal or plan
  std::vector<Descriptor*> parts{};  // what it was made of
  cudnnContext* handle = nullptr;    // of a graph or plan
  int64_t workspace_bytes = 0;       // of a plan

  template <class T>
  std::vector<T> all(cudnnBackendAttributeName_t name) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    std::vector<T> values(found->second.bytes.size() / sizeof(T));
    std::memcpy(values.data(), found->second.bytes.data(), values.size() * sizeof(T));
    return values;
  }
  template <class T>
  std::optional<T> one(cudnnBackendAttributeName_t name) const {
    const std::vector<T> values = all<T>(name);
    return values.size() == 1 ? std::optional<T>(values[0]) : std::nullopt;
  }
  Descriptor* part(cudnnBackendAttributeName_t name) const {
    return one<Descriptor*>(name).value_or(nullptr);
  }
};

size_t width(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    default: return 4;  // enumerations
  }
}

Descriptor* descriptor(cudnnBackendDescriptor_t object) { return static_cast<Descriptor*>(object); }

/// Whether it and all that it is made of are alive and finalized.
bool is_whole(const Descriptor* object) {
  if (!is_alive(object) || !object->finalized) return false;
  for (const Descriptor* part : object->parts) {
    if (!is_whole(part)) return false;
  }
  return true;
}

std::optional<FakeTensor> tensor_of(const Descriptor& object) {
  const auto extents = object.all<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto strides = object.all<int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  const auto id = object.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  const auto type = object.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
  const auto alignment = object.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  if (extents.size() != 4 || strides.size() != 4 || !id || !type || !alignment) return std::nullopt;
  FakeTensor tensor{*id, *type, {}, {}, false, false, *alignment};
  for (size_t axis = 0; axis < 4; ++axis) {
    if (extents[axis] < 1 || strides[axis] < 1) return std::nullopt;
    tensor.extents[axis] = extents[axis];
    tensor.strides[axis] = strides[axis];
  }
  tensor.is_virtual = object.one<char>(CUDNN_ATTR_TENSOR_IS_VIRTUAL).value_or(0) != 0;
  tensor.by_value = object.one<char>(CUDNN_ATTR_TENSOR_IS_BY_VALUE).value_or(0) != 0;
  return tensor;
}

/// The attributes of an operation that name its type and its tensors.
struct Names {
  FakeKind kind;
  std::optional<cudnnBackendAttributeName_t> settings;
  cudnnBackendAttributeName_t x, y;
  std::optional<cudnnBackendAttributeName_t> b, mask;
};

std::optional<Names> names_of(cudnnBackendDescriptorType_t type) {
  switch (type) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return Names{FakeKind::matmul,
                   CUDNN_ATTR_OPERATION_MATMUL_DESC,
                   CUDNN_ATTR_OPERATION_MATMUL_ADESC,
                   CUDNN_ATTR_OPERATION_MATMUL_CDESC,
                   CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                   std::nullopt};
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
      return Names{FakeKind::reduction,
                   CUDNN_ATTR_OPERATION_REDUCTION_DESC,
                   CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                   CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
                   std::nullopt,
                   std::nullopt};
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      return Names{FakeKind::reshape,
                   std::nullopt,
                   CUDNN_ATTR_OPERATION_RESHAPE_XDESC,
                   CUDNN_ATTR_OPERATION_RESHAPE_YDESC,
                   std::nullopt,
                   std::nullopt};
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      return Names{FakeKind::pointwise,
                   CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
                   CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
    default: return std::nullopt;
  }
}

cudnnStatus_t finalize_operation(Descriptor& object, const Names& names) {
  FakeOperation operation;
  operation.kind = names.kind;
  const Descriptor* const x = object.part(names.x);
  const Descriptor* const y = object.part(names.y);
  if (!x || !y) return bad("an operation without its tensors");
  operation.x = *tensor_of(*x);
  operation.y = *tensor_of(*y);
  if (names.b) {
    if (const Descriptor* b = object.part(*names.b)) operation.b = *tensor_of(*b);
  }
  if (names.mask) {
    if (const Descriptor* mask = object.part(*names.mask)) operation.mask = *tensor_of(*mask);
  }
  if (names.kind == FakeKind::matmul && !operation.b) return bad("a product of one matrix");
  if (names.settings) {
    const Descriptor* const settings = object.part(*names.settings);
    if (!settings) return bad("an operation without its type");
    operation.reduction = settings->one<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR)
                              .value_or(CUDNN_REDUCE_TENSOR_NORM2);
    operation.mode = settings->one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE)
                         .value_or(CUDNN_POINTWISE_TAN);
    operation.axis = settings->one<int64_t>(CUDNN_ATTR_POINTWISE_AXIS).value_or(-1);
  }
  const std::string error = wrong_in(operation);
  if (!error.empty()) return bad(error);
  object.program = {operation};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_graph(Descriptor& object) {
  for (const Descriptor* part : object.all<Descriptor*>(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    object.program.insert(object.program.end(), part->program.begin(), part->program.end());
  }
  const std::string error = wrong_in(object.program);
  if (!error.empty()) return bad(error);
  object.handle = object.one<cudnnContext*>(CUDNN_ATTR_OPERATIONGRAPH_HANDLE).value_or(nullptr);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_heuristics(Descriptor& object) {
  const Descriptor* const graph = object.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  if (!graph) return bad("heuristics of no graph");
  if (!graph->handle && !object.part(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP)) {
    return bad("heuristics of no GPU");
  }
  object.program = graph->program;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_plan(Descriptor& object) {
  const Descriptor* const proposal = object.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  if (!proposal) return bad("a plan of nothing");
  object.handle = object.one<cudnnContext*>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE).value_or(nullptr);
  if (!object.handle && !object.part(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP)) {
    return bad("a plan for no GPU");
  }
  if (refusals > 0) {
    --refusals;
    last_text = "told to refuse";
    return CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN;
  }
  object.program = proposal->program;
  object.workspace_bytes = workspace_of_plans;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalize_by_type(Descriptor& object) {
  if (const auto names = names_of(object.type)) return finalize_operation(object, *names);
  switch (object.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return tensor_of(object) ? CUDNN_STATUS_SUCCESS : bad("a tensor that lacks something");
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return finalize_graph(object);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: return finalize_heuristics(object);
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return finalize_plan(object);
    default: return CUDNN_STATUS_SUCCESS;
  }
}

/// An execution on its way along a stream.
struct Task {
  FakeProgram program;
  FakeArguments arguments;
  void* workspace;
  int64_t workspace_bytes;
};

void run(void* argument) {
  const std::unique_ptr<Task> task(static_cast<Task*>(argument));
  if (task->workspace_bytes > 0) {
    std::memset(task->workspace, 0xcd, static_cast<size_t>(task->workspace_bytes));
  }
  run_fake_program(task->program, task->arguments);
}

/// Empty, or what is wrong with the arguments.
std::string take_arguments(const FakeProgram& program, const std::map<int64_t, void*>& given,
                           FakeArguments& arguments) {
  std::set<int64_t> used;
  for (const FakeOperation& operation : program) {
    for (const FakeTensor* tensor :
         {&operation.x, &operation.y, operation.b ? &*operation.b : nullptr,
          operation.mask ? &*operation.mask : nullptr}) {
      if (!tensor || tensor->is_virtual) continue;
      const auto found = given.find(tensor->id);
      if (found == given.end() || !found->second) {
        return "no argument for tensor " + std::to_string(tensor->id);
      }
      if (reinterpret_cast<uintptr_t>(found->second) % static_cast<uintptr_t>(tensor->alignment)) {
        return "tensor " + std::to_string(tensor->id) + " is not aligned";
      }
      used.insert(tensor->id);
      if (tensor->by_value) {
        arguments.numbers[tensor->id] = *static_cast<const float*>(found->second);
      } else {
        arguments.memory[tensor->id] = found->second;
      }
    }
  }
  return used.size() == given.size() ? "" : "an argument for a tensor that the plan has not";
}

cudnnStatus_t give_proposals(const Descriptor& heuristics, int64_t wanted, int64_t* count,
                             void* out) {
  *count = wanted == 0 ? kProposals : std::min(wanted, kProposals);
  for (int64_t i = 0; wanted > 0 && i < *count; ++i) {
    Descriptor* const proposal = static_cast<Descriptor**>(out)[i];
    if (!is_alive(proposal)) return bad("a proposal has no descriptor");
    proposal->program = heuristics.program;
    proposal->parts = heuristics.parts;
    proposal->finalized = true;
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

void fake_cudnn_set_enqueue(FakeCudnnEnqueue enqueue) { enqueue_hook = enqueue; }
void fake_cudnn_set_workspace(int64_t bytes) { workspace_of_plans = bytes; }
void fake_cudnn_refuse_plans(int plans) { refusals = plans; }
void fake_cudnn_fail_execution() { fails_next = true; }
int fake_cudnn_executions() { return executions; }
int fake_cudnn_live_objects() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(alive.size());
}

size_t cudnnGetVersion() { return CUDNN_VERSION; }

const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN:
      return "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN";
    case CUDNN_STATUS_EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
    default: return "another status";
  }
}

void cudnnGetLastErrorString(char* text, size_t size) {
  std::snprintf(text, size, "%s", last_text.c_str());
  last_text.clear();
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  const std::lock_guard lock(mutex);
  alive.insert(*handle);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  const std::lock_guard lock(mutex);
  if (alive.erase(handle) == 0) return CUDNN_STATUS_BAD_PARAM;
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (!is_alive(handle)) return bad("a stream for no handle");
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* object) {
  *object = new Descriptor{type};
  const std::lock_guard lock(mutex);
  alive.insert(*object);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t object) {
  const std::lock_guard lock(mutex);
  if (alive.erase(object) == 0) return CUDNN_STATUS_BAD_PARAM;
  delete descriptor(object);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t object,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  if (!is_alive(object)) return bad("an attribute of no descriptor");
  if (descriptor(object)->finalized) return bad("an attribute of a finalized descriptor");
  if (!values || count < 1) return bad("an attribute without values");
  const auto* const from = static_cast<const std::byte*>(values);
  Attribute attribute{type, {from, from + static_cast<size_t>(count) * width(type)}};
  descriptor(object)->attributes[name] = std::move(attribute);
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
  for (Descriptor* part : descriptor(object)->all<Descriptor*>(name)) {
    if (!is_whole(part)) return bad("a descriptor that is not finalized, or destroyed");
    descriptor(object)->parts.push_back(part);
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t object) {
  if (!is_alive(object)) return bad("no descriptor is finalized");
  if (descriptor(object)->finalized) return bad("a descriptor is finalized twice");
  for (const Descriptor* part : descriptor(object)->parts) {
    if (!is_whole(part)) return bad("a descriptor of destroyed ones");
  }
  const cudnnStatus_t status = finalize_by_type(*descriptor(object));
  descriptor(object)->finalized = status == CUDNN_STATUS_SUCCESS;
  return status;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t object,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted,
                                       int64_t* count, void* out) {
  if (!is_whole(descriptor(object))) return bad("a descriptor that is not finalized is asked");
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS && type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    return give_proposals(*descriptor(object), wanted, count, out);
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && type == CUDNN_TYPE_INT64 && wanted == 1) {
    *count = 1;
    *static_cast<int64_t*>(out) = descriptor(object)->workspace_bytes;
    return CUDNN_STATUS_SUCCESS;
  }
  return bad("an attribute that it cannot give");
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
  const Descriptor* const from = descriptor(plan);
  const Descriptor* const arguments = descriptor(pack);
  if (!is_alive(handle) || !is_whole(from) || !is_whole(arguments)) {
    return bad("an execution of something destroyed");
  }
  if (from->handle != handle) return bad("a plan that was made for another GPU");
  const auto ids = arguments->all<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = arguments->all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  if (ids.size() != pointers.size()) return bad("as many ids as pointers are needed");
  std::map<int64_t, void*> given;
  for (size_t i = 0; i < ids.size(); ++i) given[ids[i]] = pointers[i];
  auto task = std::make_unique<Task>();
  task->program = from->program;
  task->workspace_bytes = from->workspace_bytes;
  task->workspace = arguments->one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE).value_or(nullptr);
  if (task->workspace_bytes > 0 && !task->workspace) return bad("no workspace");
  const std::string error = take_arguments(task->program, given, task->arguments);
  if (!error.empty()) return bad(error);
  if (uses_memory(task->program, task->arguments, task->workspace,
                  static_cast<uint64_t>(task->workspace_bytes))) {
    return bad("the workspace overlaps a tensor");
  }
  if (fails_next.exchange(false)) return wrong(CUDNN_STATUS_EXECUTION_FAILED, "told to fail");
  ++executions;
  if (const FakeCudnnEnqueue enqueue = enqueue_hook) {
    enqueue(handle->stream, run, task.release());
  } else {
    run(task.release());
  }
  return CUDNN_STATUS_SUCCESS;
}
}
