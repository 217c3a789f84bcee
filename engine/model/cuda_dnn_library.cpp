// Resolves the functions.
#include "engine/model/cuda_dnn_library.h"

#include <utility>

#include "engine/base/error.h"
#include "engine/base/shared_library.h"

namespace overspill::cuda {
namespace {

// Plans for the attention graphs, without the padding that older versions need for a sequence that
// is no multiple of 128.
constexpr size_t kOldestVersion = 91600;

std::string version_text(size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

std::optional<DnnLibrary> open_dnn_library(std::string& refusal) {
  const SharedLibrary file(
      {.title = "cuDNN",
       .purpose = "which attention on tensor cores comes from",
       .variable = "OVERSPILL_CUDNN_LIBRARY",
       .file = "libcudnn.so.9",
       .packages = "\"pip install nvidia-cudnn-cu13\" or NVIDIA's apt package libcudnn9-cuda-13",
       .version = version_text(kOldestVersion) + " or later"});
  if (!file.opened()) {
    refusal = file.refusal();
    if (file.named()) {
      fail(ErrorCode::invalid_config, "OVERSPILL_CUDNN_LIBRARY={}: {}", file.path(), refusal);
    }
    return std::nullopt;
  }
  const auto resolve = [&](auto*& function, const char* name) { file.resolve(function, name); };
  DnnLibrary library{};
  resolve(library.version, "cudnnGetVersion");
  if (library.version() < kOldestVersion) file.refuse_version(version_text(library.version()));
  resolve(library.status_text, "cudnnGetErrorString");
  resolve(library.last_error, "cudnnGetLastErrorString");
  resolve(library.create, "cudnnCreate");
  resolve(library.destroy, "cudnnDestroy");
  resolve(library.set_stream, "cudnnSetStream");
  resolve(library.create_descriptor, "cudnnBackendCreateDescriptor");
  resolve(library.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  resolve(library.set_attribute, "cudnnBackendSetAttribute");
  resolve(library.get_attribute, "cudnnBackendGetAttribute");
  resolve(library.finalize, "cudnnBackendFinalize");
  resolve(library.execute, "cudnnBackendExecute");
  return library;
}

std::string dnn_error_text(const DnnLibrary& library, cudnnStatus_t status) {
  char text[512] = {};
  library.last_error(text, sizeof text);
  std::string last = text;
  last.erase(last.find_last_not_of(" \n") + 1);
  return fmt::format("{} ({}){}{}", library.status_text(status), static_cast<int>(status),
                     last.empty() ? "" : ": ", last);
}

void check_dnn(const DnnLibrary& library, cudnnStatus_t status, const char* doing) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  fail(ErrorCode::io, "cuDNN cannot {}: {}", doing, dnn_error_text(library, status));
}

DnnHandle::DnnHandle(const DnnLibrary& library) : library_(&library) {
  check_dnn(library, library.create(&handle_), "make a context on the GPU");
}

DnnHandle::~DnnHandle() {
  if (handle_) library_->destroy(handle_);
}

DnnHandle::DnnHandle(DnnHandle&& other) noexcept
    : library_(other.library_), handle_(std::exchange(other.handle_, nullptr)) {}

void DnnHandle::set_stream(cudaStream_t stream) const {
  check_dnn(*library_, library_->set_stream(handle_, stream), "take a stream");
}

}  // namespace overspill::cuda
