// NVIDIA's cuDNN, opened at run time, so that one binary starts without it. Types and numbers are
// those of NVIDIA's headers.
#pragma once

#include <cudnn_graph.h>

#include <optional>
#include <string>

namespace overspill::cuda {

/// The functions of the backend API that are used. It outlives all that is made with it.
struct DnnLibrary {
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnGetErrorString) status_text;
  decltype(&cudnnGetLastErrorString) last_error;
  decltype(&cudnnCreate) create;
  decltype(&cudnnDestroy) destroy;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
};

/// libcudnn.so.9, or the file that the environment's OVERSPILL_CUDNN_LIBRARY names. It stays
/// loaded. Nothing when there is none: then `refusal` says why and what to do. Throws
/// Error(invalid_config) when the file is named but is not cuDNN, or is too old.
std::optional<DnnLibrary> open_dnn_library(std::string& refusal);

/// What cuDNN says of a status, with its last message.
std::string dnn_error_text(const DnnLibrary& library, cudnnStatus_t status);

/// Throws Error(io) unless `status` is success. `doing` completes "cuDNN cannot ...".
void check_dnn(const DnnLibrary& library, cudnnStatus_t status, const char* doing);

/// A context on the current GPU. Move-only; one thread at a time.
class DnnHandle {
 public:
  explicit DnnHandle(const DnnLibrary& library);
  ~DnnHandle();
  DnnHandle(DnnHandle&& other) noexcept;
  DnnHandle& operator=(DnnHandle&&) = delete;

  void set_stream(cudaStream_t stream) const;
  cudnnHandle_t get() const { return handle_; }
  const DnnLibrary& library() const { return *library_; }

 private:
  const DnnLibrary* library_;
  cudnnHandle_t handle_ = nullptr;
};

}  // namespace overspill::cuda
