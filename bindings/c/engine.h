// What a handle stands for. Handles are numbers that are never used again, so that a destroyed one
// is known for what it is; an engine lives until the last call on it has returned.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "bindings/c/status.h"
#include "engine/base/log_scope.h"
#include "engine/collective/ranks.h"
#include "engine/pager/activation_store.h"
#include "engine/pager/host_blocks.h"
#include "engine/pager/pager.h"
#include "engine/train/progress_scope.h"

namespace overspill {

/// Of a handle that no engine has.
class HandleError : public Error {
 public:
  HandleError()
      : Error(ErrorCode::invalid_config,
              "this is no engine's handle: none was created, or it is destroyed") {}
};

/// The program's callbacks, called one at a time.
class Callbacks {
 public:
  explicit Callbacks(const osp_engine_options_t& options);

  const LogSink* log() const { return log_ ? &log_ : nullptr; }
  const ProgressObserver* progress() const { return progress_ ? &progress_ : nullptr; }
  void warn(const std::string& message) const;

 private:
  mutable std::mutex mutex_;
  LogSink log_;
  ProgressObserver progress_;
};

struct Engine {
  Engine(const char* configuration, const osp_engine_options_t& options);

  const osp_engine_options_t options;  ///< its texts are not kept
  Callbacks callbacks;
  TrainConfig config;
  std::optional<uint32_t> gpu;  ///< the device; else the host
  std::unique_ptr<Ranks> ranks;
  std::unique_ptr<HostBlocks> blocks;

  std::mutex mutex;  ///< of what follows until the engine is finalized
  LayerRegistry registry;
  std::optional<std::vector<uint32_t>> order;
  bool finalized = false;  ///< or osp_finalize has failed
  std::unique_ptr<Pager> pager;
  std::unique_ptr<ActivationStore> activations;  ///< on the pager's device
};

/// Throws HandleError.
std::shared_ptr<Engine> engine_of(osp_engine_t handle);
osp_engine_t add_engine(std::shared_ptr<Engine> engine);
/// The handle's engine, which has no handle from now on.
std::shared_ptr<Engine> remove_engine(osp_engine_t handle);

/// Throws MisuseError before osp_finalize.
Pager& pager_of(Engine& engine);

/// A call on an engine, with its callbacks.
osp_status_t on_engine(osp_engine_t handle, const std::function<void(Engine&)>& body);
/// The same on a finalized one.
osp_status_t on_pager(osp_engine_t handle, const std::function<void(Engine&, Pager&)>& body);

// Arguments. All throw MisuseError.

void require_pointer(const void* pointer, const char* name);
/// There are no streams on the host.
void require_stream_of(const Engine& engine, void* stream);
/// `type` as the engine's numbers name it.
DType dtype_of(osp_dtype_t type, const Engine& engine);
/// What a caller's structure, of its size, may have at least of the first fields.
void require_size(size_t size, size_t least, const char* name);
/// Copies text with a final zero, as much as fits.
void give_text(const std::string& text, char* out, size_t capacity, size_t* needed);

/// The caller's structure, which may be of an older and shorter version, over the defaults.
template <class Options>
Options read_options(const Options* given, const Options& defaults, const char* name) {
  Options options = defaults;
  if (given == nullptr) return options;
  require_size(given->size, sizeof(size_t), name);
  std::copy_n(reinterpret_cast<const char*>(given), std::min(given->size, sizeof(Options)),
              reinterpret_cast<char*>(&options));
  options.size = sizeof(Options);
  return options;
}

/// Fills a caller's structure as far as its version goes; `size` stays.
template <class Result>
void give_result(const Result& result, Result* out, const char* name) {
  if (out == nullptr) return;
  require_size(out->size, sizeof(size_t), name);
  const size_t size = out->size;
  std::copy_n(reinterpret_cast<const char*>(&result), std::min(size, sizeof(Result)),
              reinterpret_cast<char*>(out));
  out->size = size;
}

}  // namespace overspill
