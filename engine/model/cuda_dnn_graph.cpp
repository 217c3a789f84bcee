// Attributes are set one by one; cuDNN checks a descriptor when it is finalized.
#include "engine/model/cuda_dnn_graph.h"

#include "engine/base/error.h"

namespace overspill::cuda {
namespace {

constexpr int64_t kMemoryAlignment = 16;

/// Heuristics in the order in which cuDNN recommends them.
std::vector<DnnDescriptor> proposals(const DnnTarget& target, const DnnDescriptor& operations,
                                     std::string& refusal) {
  const DnnLibrary& library = target.library();
  DnnDescriptor heuristics(library, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
  if (target.description()) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *target.description());
  std::vector<DnnDescriptor> configurations;
  if (const cudnnStatus_t status = heuristics.try_finalize(); status != CUDNN_STATUS_SUCCESS) {
    refusal = dnn_error_text(library, status);
    return configurations;
  }
  int64_t count = 0;
  check_dnn(library,
            library.get_attribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                  CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
            "count its proposals for a graph");
  std::vector<cudnnBackendDescriptor_t> handles;
  for (int64_t i = 0; i < count; ++i) {
    configurations.emplace_back(library, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    handles.push_back(configurations.back().get());
  }
  int64_t filled = 0;
  check_dnn(library,
            library.get_attribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                  CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &filled, handles.data()),
            "give its proposals for a graph");
  while (static_cast<int64_t>(configurations.size()) > filled) configurations.pop_back();
  if (configurations.empty()) refusal = "cuDNN proposes no kernel";
  return configurations;
}

}  // namespace

DnnDescriptor::DnnDescriptor(const DnnLibrary& library, cudnnBackendDescriptorType_t type)
    : library_(&library) {
  check_dnn(library, library.create_descriptor(type, &descriptor_), "make a descriptor");
}

DnnDescriptor::~DnnDescriptor() {
  if (descriptor_) library_->destroy_descriptor(descriptor_);
}

DnnDescriptor::DnnDescriptor(DnnDescriptor&& other) noexcept
    : library_(other.library_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}

DnnDescriptor& DnnDescriptor::operator=(DnnDescriptor&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

void DnnDescriptor::set_values(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                               int64_t count, const void* values) {
  const cudnnStatus_t status = library_->set_attribute(descriptor_, name, type, count, values);
  if (status == CUDNN_STATUS_SUCCESS) return;
  fail(ErrorCode::io, "cuDNN cannot take attribute {} of a descriptor: {}", static_cast<int>(name),
       dnn_error_text(*library_, status));
}

void DnnDescriptor::finalize(const char* what) {
  const cudnnStatus_t status = try_finalize();
  if (status == CUDNN_STATUS_SUCCESS) return;
  fail(ErrorCode::io, "cuDNN cannot build {}: {}", what, dnn_error_text(*library_, status));
}

cudnnStatus_t DnnDescriptor::try_finalize() { return library_->finalize(descriptor_); }

DnnTarget::DnnTarget(const DnnLibrary& library, const std::string& device_json)
    : library_(&library) {
  description_.emplace(library, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  description_->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                    std::span<const char>(device_json));
  description_->finalize("the description of a GPU");
}

DnnTensor DnnGraph::add_tensor(cudnnDataType_t type, const DnnTensorShape& shape, int64_t id,
                               bool is_virtual, bool by_value) {
  DnnDescriptor tensor(*library_, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64,
             std::span<const int64_t>(shape.extents));
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const int64_t>(shape.strides));
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64,
             by_value ? int64_t{4} : kMemoryAlignment);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
  tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value);
  tensor.finalize("a tensor");
  tensors_.push_back(std::move(tensor));
  return {tensors_.size() - 1};
}

DnnTensor DnnGraph::memory(int64_t id, cudnnDataType_t type, const DnnTensorShape& shape) {
  CHECK(id < kFirstVirtualId);
  return add_tensor(type, shape, id, false, false);
}

DnnTensor DnnGraph::number(int64_t id, cudnnDataType_t type) {
  CHECK(id < kFirstVirtualId);
  return add_tensor(type, {{1, 1, 1, 1}, {1, 1, 1, 1}}, id, false, true);
}

DnnTensor DnnGraph::between(cudnnDataType_t type, const DnnTensorShape& shape) {
  return add_tensor(type, shape, next_id_++, true, false);
}

void DnnGraph::add(DnnDescriptor operation, const char* what) {
  operation.finalize(what);
  operations_.push_back(std::move(operation));
}

void DnnGraph::matmul(DnnTensor a, DnnTensor b, DnnTensor c) {
  DnnDescriptor kind(*library_, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  kind.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  kind.finalize("the type of a matrix product");
  DnnDescriptor operation(*library_, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, at(a));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, at(b));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, at(c));
  parts_.push_back(std::move(kind));
  add(std::move(operation), "a matrix product");
}

void DnnGraph::reduce(cudnnReduceTensorOp_t op, DnnTensor x, DnnTensor y) {
  DnnDescriptor kind(*library_, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  kind.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
  kind.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  kind.finalize("the type of a reduction");
  DnnDescriptor operation(*library_, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, at(x));
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, at(y));
  parts_.push_back(std::move(kind));
  add(std::move(operation), "a reduction");
}

void DnnGraph::reshape(DnnTensor x, DnnTensor y) {
  DnnDescriptor operation(*library_, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, at(x));
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, at(y));
  add(std::move(operation), "a reshape");
}

void DnnGraph::pointwise(const Pointwise& operation, DnnTensor y) {
  DnnDescriptor kind(*library_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, operation.mode);
  kind.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, operation.precision);
  if (operation.axis >= 0) kind.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, operation.axis);
  kind.finalize("the type of a pointwise operation");
  DnnDescriptor node(*library_, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, at(operation.x));
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, at(y));
  if (operation.b) node.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, at(*operation.b));
  if (operation.mask) node.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, at(*operation.mask));
  parts_.push_back(std::move(kind));
  add(std::move(node), "a pointwise operation");
}

std::optional<DnnPlan> DnnPlan::make(const DnnTarget& target, DnnGraph graph,
                                     uint64_t most_workspace_bytes, std::string& refusal) {
  const DnnLibrary& library = target.library();
  std::vector<cudnnBackendDescriptor_t> handles;
  for (const DnnDescriptor& operation : graph.operations()) handles.push_back(operation.get());
  DnnDescriptor operations(library, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  operations.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                 std::span<const cudnnBackendDescriptor_t>(handles));
  if (target.handle()) {
    operations.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, target.handle());
  }
  if (const cudnnStatus_t status = operations.try_finalize(); status != CUDNN_STATUS_SUCCESS) {
    refusal = dnn_error_text(library, status);
    return std::nullopt;
  }
  for (DnnDescriptor& configuration : proposals(target, operations, refusal)) {
    DnnDescriptor plan(library, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    if (target.handle()) {
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, target.handle());
    } else {
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *target.description());
    }
    if (const cudnnStatus_t status = plan.try_finalize(); status != CUDNN_STATUS_SUCCESS) {
      refusal = dnn_error_text(library, status);
      continue;
    }
    int64_t bytes = 0, count = 0;
    check_dnn(library,
              library.get_attribute(plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                    CUDNN_TYPE_INT64, 1, &count, &bytes),
              "say how much workspace a plan needs");
    if (static_cast<uint64_t>(bytes) > most_workspace_bytes) {
      refusal = fmt::format("the plan needs {} bytes of workspace, {} may be used", bytes,
                            most_workspace_bytes);
      continue;
    }
    return DnnPlan(std::move(graph), std::move(operations), std::move(configuration),
                   std::move(plan), static_cast<uint64_t>(bytes));
  }
  return std::nullopt;
}

void DnnPlan::execute(const DnnHandle& handle, std::span<const DnnArgument> arguments,
                      void* workspace) const {
  std::vector<int64_t> ids;
  std::vector<const void*> pointers;
  for (const DnnArgument& argument : arguments) {
    ids.push_back(argument.id);
    pointers.push_back(argument.memory);
  }
  const DnnLibrary& library = handle.library();
  DnnDescriptor pack(library, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const int64_t>(ids));
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           std::span<const void* const>(pointers));
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  pack.finalize("the arguments of a plan");
  check_dnn(library, library.execute(handle.get(), plan_.get(), pack.get()), "execute a plan");
}

}  // namespace overspill::cuda
