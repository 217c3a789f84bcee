// Statuses and their texts.
#include "bindings/c/status.h"

#include <exception>
#include <filesystem>
#include <new>
#include <string>

#include "bindings/c/engine.h"
#include "engine/pager/misuse.h"

namespace overspill {
namespace {

thread_local std::string last_error;

osp_status_t status_of(Misuse kind) {
  switch (kind) {
    case Misuse::bad_argument: return OSP_ERROR_INVALID_ARGUMENT;
    case Misuse::not_finalized: return OSP_ERROR_NOT_FINALIZED;
    case Misuse::already_finalized: return OSP_ERROR_ALREADY_FINALIZED;
    case Misuse::unknown_tensor: return OSP_ERROR_UNKNOWN_TENSOR;
    case Misuse::duplicate_name: return OSP_ERROR_DUPLICATE_NAME;
    case Misuse::size_mismatch: return OSP_ERROR_SIZE_MISMATCH;
    case Misuse::dtype_mismatch: return OSP_ERROR_DTYPE_MISMATCH;
    case Misuse::already_acquired: return OSP_ERROR_ALREADY_ACQUIRED;
    case Misuse::not_acquired: return OSP_ERROR_NOT_ACQUIRED;
    case Misuse::no_slot: return OSP_ERROR_NO_SLOT;
    case Misuse::layers_held: return OSP_ERROR_LAYERS_HELD;
    case Misuse::frozen: return OSP_ERROR_FROZEN;
    case Misuse::gradient_complete: return OSP_ERROR_GRADIENT_COMPLETE;
    case Misuse::gradient_missing: return OSP_ERROR_GRADIENT_MISSING;
    case Misuse::step_not_started: return OSP_ERROR_STEP_NOT_STARTED;
    case Misuse::no_weights: return OSP_ERROR_NO_WEIGHTS;
    case Misuse::unsupported: return OSP_ERROR_UNSUPPORTED;
  }
  return OSP_ERROR_INTERNAL;
}

osp_status_t status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_config: return OSP_ERROR_INVALID_CONFIG;
    case ErrorCode::invalid_file: return OSP_ERROR_INVALID_FILE;
    case ErrorCode::not_found: return OSP_ERROR_NOT_FOUND;
    case ErrorCode::does_not_fit: return OSP_ERROR_DOES_NOT_FIT;
    case ErrorCode::io: return OSP_ERROR_IO;
    case ErrorCode::non_finite: return OSP_ERROR_NON_FINITE;
    case ErrorCode::rank_lost: return OSP_ERROR_RANK_LOST;
    case ErrorCode::cancelled: return OSP_ERROR_CANCELLED;
    case ErrorCode::internal: return OSP_ERROR_INTERNAL;
  }
  return OSP_ERROR_INTERNAL;
}

osp_status_t failed(osp_status_t status, const char* text) {
  last_error = text;
  return status;
}

}  // namespace

osp_status_t guarded(const std::function<void()>& body) {
  try {
    body();
    return OSP_SUCCESS;
  } catch (const HandleError& error) {
    return failed(OSP_ERROR_INVALID_HANDLE, error.what());
  } catch (const MisuseError& error) {
    return failed(status_of(error.kind()), error.what());
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return failed(OSP_ERROR_IO, error.what());
  } catch (const std::bad_alloc&) {
    return failed(OSP_ERROR_DOES_NOT_FIT, "the system has no memory left for this call");
  } catch (const std::exception& error) {
    return failed(OSP_ERROR_INTERNAL, error.what());
  } catch (...) {
    return failed(OSP_ERROR_INTERNAL, "an exception of an unknown type; please report this");
  }
}

}  // namespace overspill

extern "C" {

const char* osp_status_string(osp_status_t status) {
#define OSP_NAME(name) \
  case name: return #name
  switch (status) {
    OSP_NAME(OSP_SUCCESS);
    OSP_NAME(OSP_ERROR_INVALID_ARGUMENT);
    OSP_NAME(OSP_ERROR_INVALID_HANDLE);
    OSP_NAME(OSP_ERROR_INVALID_CONFIG);
    OSP_NAME(OSP_ERROR_NOT_FINALIZED);
    OSP_NAME(OSP_ERROR_ALREADY_FINALIZED);
    OSP_NAME(OSP_ERROR_UNKNOWN_TENSOR);
    OSP_NAME(OSP_ERROR_DUPLICATE_NAME);
    OSP_NAME(OSP_ERROR_SIZE_MISMATCH);
    OSP_NAME(OSP_ERROR_DTYPE_MISMATCH);
    OSP_NAME(OSP_ERROR_ALREADY_ACQUIRED);
    OSP_NAME(OSP_ERROR_NOT_ACQUIRED);
    OSP_NAME(OSP_ERROR_NO_SLOT);
    OSP_NAME(OSP_ERROR_LAYERS_HELD);
    OSP_NAME(OSP_ERROR_FROZEN);
    OSP_NAME(OSP_ERROR_GRADIENT_COMPLETE);
    OSP_NAME(OSP_ERROR_GRADIENT_MISSING);
    OSP_NAME(OSP_ERROR_STEP_NOT_STARTED);
    OSP_NAME(OSP_ERROR_NO_WEIGHTS);
    OSP_NAME(OSP_ERROR_INVALID_FILE);
    OSP_NAME(OSP_ERROR_NOT_FOUND);
    OSP_NAME(OSP_ERROR_DOES_NOT_FIT);
    OSP_NAME(OSP_ERROR_UNSUPPORTED);
    OSP_NAME(OSP_ERROR_CANCELLED);
    OSP_NAME(OSP_ERROR_IO);
    OSP_NAME(OSP_ERROR_NON_FINITE);
    OSP_NAME(OSP_ERROR_RANK_LOST);
    OSP_NAME(OSP_ERROR_INTERNAL);
  }
#undef OSP_NAME
  return "OSP_ERROR_UNKNOWN";
}

const char* osp_last_error(void) { return overspill::last_error.c_str(); }

uint32_t osp_version(void) {
  return OSP_VERSION_MAJOR * 10000 + OSP_VERSION_MINOR * 100 + OSP_VERSION_PATCH;
}

}  // extern "C"
