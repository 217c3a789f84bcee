// cuDNN's backend API as a builder of operation graphs and their execution plans: descriptors that
// free themselves, tensors of four dimensions, matrix products, pointwise operations, reductions
// and reshapes, all computed in float32. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/cuda_dnn_library.h"

namespace overspill::cuda {

/// One descriptor of the backend. Move-only.
class DnnDescriptor {
 public:
  DnnDescriptor(const DnnLibrary& library, cudnnBackendDescriptorType_t type);
  ~DnnDescriptor();
  DnnDescriptor(DnnDescriptor&& other) noexcept;
  DnnDescriptor& operator=(DnnDescriptor&& other) noexcept;

  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           std::span<const T> values) {
    set_values(name, type, static_cast<int64_t>(values.size()), values.data());
  }
  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    set_values(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const DnnDescriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.get());
  }
  /// `what` completes "cuDNN cannot build ...".
  void finalize(const char* what);
  /// The status instead of an exception, for what cuDNN may well not support.
  cudnnStatus_t try_finalize();
  cudnnBackendDescriptor_t get() const { return descriptor_; }

 private:
  void set_values(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                  const void* values);

  const DnnLibrary* library_;
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

/// What plans are made for: the GPU of a handle, or a GPU described in cuDNN's JSON form, whose
/// plans can be asked about but not executed.
class DnnTarget {
 public:
  explicit DnnTarget(const DnnHandle& handle)
      : library_(&handle.library()), handle_(handle.get()) {}
  DnnTarget(const DnnLibrary& library, const std::string& device_json);

  const DnnLibrary& library() const { return *library_; }
  /// Null for a described GPU.
  cudnnHandle_t handle() const { return handle_; }
  const DnnDescriptor* description() const { return description_ ? &*description_ : nullptr; }

 private:
  const DnnLibrary* library_;
  cudnnHandle_t handle_ = nullptr;
  std::optional<DnnDescriptor> description_;
};

using DnnExtents = std::array<int64_t, 4>;

struct DnnTensorShape {
  DnnExtents extents;
  DnnExtents strides;  ///< in elements
};

/// A tensor of a graph.
struct DnnTensor {
  size_t index;
};

/// Operations in order. Tensors of memory have an id of their own choice below kFirstVirtualId.
class DnnGraph {
 public:
  static constexpr int64_t kFirstVirtualId = 1000;

  explicit DnnGraph(const DnnLibrary& library) : library_(&library) {}

  /// A tensor in the GPU's memory, aligned to 16 bytes.
  DnnTensor memory(int64_t id, cudnnDataType_t type, const DnnTensorShape& shape);
  /// A number on the host, read when the plan is executed.
  DnnTensor number(int64_t id, cudnnDataType_t type);
  /// A tensor between operations.
  DnnTensor between(cudnnDataType_t type, const DnnTensorShape& shape);

  void matmul(DnnTensor a, DnnTensor b, DnnTensor c);
  void reduce(cudnnReduceTensorOp_t op, DnnTensor x, DnnTensor y);
  void reshape(DnnTensor x, DnnTensor y);

  struct Pointwise {
    cudnnPointwiseMode_t mode;
    DnnTensor x;
    std::optional<DnnTensor> b{};
    std::optional<DnnTensor> mask{};  ///< of a select
    int64_t axis = -1;                ///< of an index
    cudnnDataType_t precision = CUDNN_DATA_FLOAT;
  };
  void pointwise(const Pointwise& operation, DnnTensor y);

  const std::vector<DnnDescriptor>& operations() const { return operations_; }

 private:
  DnnTensor add_tensor(cudnnDataType_t type, const DnnTensorShape& shape, int64_t id,
                       bool is_virtual, bool by_value);
  const DnnDescriptor& at(DnnTensor tensor) const { return tensors_[tensor.index]; }
  void add(DnnDescriptor operation, const char* what);

  const DnnLibrary* library_;
  std::vector<DnnDescriptor> tensors_, parts_, operations_;
  int64_t next_id_ = kFirstVirtualId;
};

struct DnnArgument {
  int64_t id;
  const void* memory;  ///< the host's for numbers
};

/// The executable form of a graph on one GPU. Move-only.
class DnnPlan {
 public:
  /// The first of cuDNN's proposals that it can build and that needs no more workspace than
  /// `most_workspace_bytes`. Nothing when there is none: then `refusal` says why.
  static std::optional<DnnPlan> make(const DnnTarget& target, DnnGraph graph,
                                     uint64_t most_workspace_bytes, std::string& refusal);

  uint64_t workspace_bytes() const { return workspace_bytes_; }
  /// On the handle's stream.
  void execute(const DnnHandle& handle, std::span<const DnnArgument> arguments,
               void* workspace) const;

 private:
  DnnPlan(DnnGraph graph, DnnDescriptor operations, DnnDescriptor configuration, DnnDescriptor plan,
          uint64_t workspace_bytes)
      : graph_(std::move(graph)),
        operations_(std::move(operations)),
        configuration_(std::move(configuration)),
        plan_(std::move(plan)),
        workspace_bytes_(workspace_bytes) {}

  DnnGraph graph_;  // descriptors refer to those they were made of
  DnnDescriptor operations_, configuration_, plan_;
  uint64_t workspace_bytes_;
};

}  // namespace overspill::cuda
