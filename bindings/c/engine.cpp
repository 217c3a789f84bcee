// Handles, callbacks, and how arguments are checked.
#include "bindings/c/engine.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "engine/base/log.h"
#include "engine/model/cuda_model.h"
#include "engine/train/rank_setup.h"

namespace overspill {
namespace {

/// All engines that have a handle.
struct Handles {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Engine>> engines;
  uintptr_t last = 0;
};

Handles& handles() {
  static Handles* const all = new Handles;  // programs may destroy engines while they end
  return *all;
}

osp_log_level_t level_of(LogLevel level) {
  if (level == LogLevel::debug) return OSP_LOG_DEBUG;
  return level == LogLevel::info ? OSP_LOG_INFO : OSP_LOG_WARNING;
}

RankIdentity identity_of(const osp_engine_options_t& options) {
  RankIdentity identity = options.world_size == 0 ? rank_from_environment() : RankIdentity{};
  if (options.world_size > 0) {
    if (options.rank >= options.world_size) {
      refuse(Misuse::bad_argument, "rank {} of {}: ranks count from 0", options.rank,
             options.world_size);
    }
    identity.rank = options.rank;
    identity.ranks = options.world_size;
    if (options.world_size > 1 && options.master_address == nullptr) {
      const RankIdentity environment = rank_from_environment();
      identity.master_addr = environment.master_addr;
      identity.master_port = environment.master_port;
      identity.token = environment.token;
    }
  }
  if (options.master_address == nullptr) return identity;
  const std::string address = options.master_address;
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() < 6 &&
                      std::ranges::all_of(port, [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || colon == 0 || std::stoul(port) == 0 || std::stoul(port) > 65535) {
    refuse(Misuse::bad_argument, "master_address: \"{}\"; write host:port", address);
  }
  identity.master_addr = address.substr(0, colon);
  identity.master_port = static_cast<uint16_t>(std::stoul(port));
  return identity;
}

/// The number in "cuda:N"; none in "cuda", nor where the option is not given.
std::optional<uint32_t> gpu_number(const char* option) {
  const std::string device = option == nullptr ? "cuda" : option;
  if (device == "cuda") return std::nullopt;
  constexpr size_t kPrefix = 5, kMostDigits = 4;
  const std::string digits = device.starts_with("cuda:") ? device.substr(kPrefix) : "";
  const bool number = !digits.empty() && digits.size() <= kMostDigits &&
                      std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
  if (!number) refuse(Misuse::bad_argument, "device \"{}\": accepted: host, cuda, cuda:N", device);
  return static_cast<uint32_t>(std::stoul(digits));
}

/// Whether the option and offload.device say a GPU.
bool wants_gpu(const char* option, const OffloadConfig& offload) {
  const bool host = option != nullptr && std::string(option) == "host";
  const bool named = option != nullptr && !host;
  const bool wanted = offload.device == DeviceMode::cuda;
  if (host && wanted) {
    fail(ErrorCode::invalid_config,
         "offload.device: cuda, and the engine's option device: \"host\"; remove one of them");
  }
  if (named && !wanted && offload.device != DeviceMode::automatic) {
    fail(ErrorCode::invalid_config,
         "offload.device: {} is the host, and the engine's option device: \"{}\" a GPU; remove one "
         "of them",
         offload.device == DeviceMode::unified ? "unified" : "discrete", option);
  }
  return named || wanted;
}

/// Checks that there is the GPU, before ranks meet.
void require_gpu(std::optional<uint32_t> number) {
  const std::string what = number ? fmt::format("device cuda:{}", *number) : "device cuda";
  if (*cuda_model_absence() != '\0') {
    refuse(Misuse::unsupported, "{}: {}", what, cuda_model_absence());
  }
  const CudaGpus found = cuda_devices();
  if (found.gpus.empty()) refuse(Misuse::unsupported, "{}: {}", what, found.absence);
  if (!number || *number < found.gpus.size()) return;
  refuse(Misuse::bad_argument,
         "{}: CUDA shows {} GPU{} to this process, counted from 0; see `overspill info` and "
         "CUDA_VISIBLE_DEVICES",
         what, found.gpus.size(), found.gpus.size() == 1 ? "" : "s");
}

/// Keeps a text of the configuration out of what cannot be one.
std::string checked_text(const char* configuration) {
  constexpr size_t kMost = size_t{1} << 20;
  const size_t length = configuration == nullptr ? 0 : strnlen(configuration, kMost + 1);
  if (length > kMost) {
    refuse(Misuse::bad_argument, "a configuration of more than 1 MiB");
  }
  return std::string(configuration == nullptr ? "" : configuration, length);
}

}  // namespace

Callbacks::Callbacks(const osp_engine_options_t& options) {
  if (options.log != nullptr) {
    log_ = [this, call = options.log, user = options.user, least = options.log_level](
               LogLevel level, const std::string& message) {
      const osp_log_level_t given = level_of(level);
      if (given < least) return;
      const std::lock_guard lock(mutex_);
      call(user, given, message.c_str());
    };
  }
  if (options.progress == nullptr) return;
  progress_ = [this, call = options.progress, user = options.user](const std::string& what,
                                                                   double fraction) {
    const std::lock_guard lock(mutex_);
    return call(user, what.c_str(), fraction) == 0;
  };
}

void Callbacks::warn(const std::string& message) const {
  if (log_) return log_(LogLevel::warning, message);
  write_log(LogLevel::warning, message);
}

Engine::Engine(const char* configuration, const osp_engine_options_t& given)
    : options(given), callbacks(given) {
  if (options.held_layers == 0) refuse(Misuse::bad_argument, "held_layers: 0; at least 1");
  if (options.loop != OSP_LOOP_MICRO_BATCH_MAJOR && options.loop != OSP_LOOP_LAYER_MAJOR) {
    refuse(Misuse::bad_argument, "loop: {}, which is not one of osp_loop_t",
           static_cast<int>(options.loop));
  }
  const LogScope log(callbacks.log());
  config = parse_state_config(checked_text(configuration));
  const RankIdentity identity = identity_of(options);
  const bool on_gpu = wants_gpu(options.device, config.offload);
  const auto number = on_gpu ? gpu_number(options.device) : std::nullopt;
  if (on_gpu) require_gpu(number);
  if (config.offload.device == DeviceMode::automatic) {
    config.offload.device = on_gpu ? DeviceMode::cuda : DeviceMode::unified;
  }
  if (config.offload.update_twice.value_or(false)) {
    log_warning(
        "offload.update: twice is for the native trainer: layers of other programs are updated "
        "once, as with next_forward");
  }
  if (identity.ranks > 1) check_backend(config, on_gpu);
  Ranks::Options meeting = ranks_options(config);
  meeting.last_resort = false;
  ranks = std::make_unique<Ranks>(identity, meeting);
  if (on_gpu) gpu = number ? *number : gpu_of_local_rank(ranks->identity().local_rank);
  require_own_gpus(*ranks, gpu);
  blocks = std::make_unique<HostBlocks>(gpu);
}

std::shared_ptr<Engine> engine_of(osp_engine_t handle) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  const auto found = all.engines.find(reinterpret_cast<uintptr_t>(handle));
  if (found == all.engines.end()) throw HandleError();
  return found->second;
}

osp_engine_t add_engine(std::shared_ptr<Engine> engine) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  all.engines[++all.last] = std::move(engine);
  return reinterpret_cast<osp_engine_t>(all.last);
}

std::shared_ptr<Engine> remove_engine(osp_engine_t handle) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  const auto found = all.engines.find(reinterpret_cast<uintptr_t>(handle));
  if (found == all.engines.end()) throw HandleError();
  std::shared_ptr<Engine> engine = std::move(found->second);
  all.engines.erase(found);
  return engine;
}

Pager& pager_of(Engine& engine) {
  const std::lock_guard lock(engine.mutex);
  if (engine.pager) return *engine.pager;
  refuse(Misuse::not_finalized, "{}",
         engine.finalized ? "osp_finalize has failed: destroy the engine and create another one"
                          : "the engine is not finalized: register its layers and call "
                            "osp_finalize");
}

osp_status_t on_engine(osp_engine_t handle, const std::function<void(Engine&)>& body) {
  return guarded([&] {
    const std::shared_ptr<Engine> engine = engine_of(handle);
    const GpuScope gpu(engine->gpu.has_value());
    const LogScope log(engine->callbacks.log());
    const ProgressScope progress(engine->callbacks.progress());
    body(*engine);
  });
}

osp_status_t on_pager(osp_engine_t handle, const std::function<void(Engine&, Pager&)>& body) {
  return on_engine(handle, [&](Engine& engine) { body(engine, pager_of(engine)); });
}

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) refuse(Misuse::bad_argument, "{} is null", name);
}

void require_stream_of(const Engine& engine, void* stream) {
  if (stream == nullptr || engine.gpu) return;
  refuse(Misuse::bad_argument, "a stream, and the engine's device is the host: it must be null");
}

void require_size(size_t size, size_t least, const char* name) {
  if (size >= least && size < (size_t{1} << 16)) return;
  refuse(Misuse::bad_argument, "{}: its size is {}; start from the initialiser, so that it is set",
         name, size);
}

DType dtype_of(osp_dtype_t type, const Engine& engine) {
  switch (type) {
    case OSP_DTYPE_DEFAULT:
      return engine.config.precision == Precision::bf16 ? DType::bf16 : DType::f32;
    case OSP_FLOAT32: return DType::f32;
    case OSP_BFLOAT16: return DType::bf16;
    case OSP_FLOAT16: return DType::f16;
  }
  refuse(Misuse::dtype_mismatch, "{} is not one of osp_dtype_t", static_cast<int>(type));
}

void give_text(const std::string& text, char* out, size_t capacity, size_t* needed) {
  if (capacity > 0) require_pointer(out, "text");
  if (needed != nullptr) *needed = text.size() + 1;
  if (capacity == 0) return;
  const size_t length = std::min(capacity - 1, text.size());
  std::copy_n(text.data(), length, out);
  out[length] = '\0';
}

}  // namespace overspill
