// Weights in and out, and checkpoints.
#include <algorithm>
#include <cmath>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/model/add_gradient.h"
#include "engine/pager/pager.h"
#include "engine/train/model_state.h"
#include "engine/train/rank_setup.h"
#include "engine/train/tensor_state.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using Kind = PagerWork::Kind;

nlohmann::json parse_config(const std::string& text) {
  if (text.empty()) return {};
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_object()) return json;
  refuse(Misuse::bad_argument, "the text of config.json is not a JSON object");
}

/// JSON holds no other text.
void require_utf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    refuse(Misuse::bad_argument, "user_state is not UTF-8; encode bytes, for example in base64");
  }
}

}  // namespace

/// What slots hold is not the layers' weights any more, or may be overwritten by state in transit.
void Pager::forget_weights() { ring_.clear(); }

void Pager::require_weights() const {
  if (weights_set_) return;
  refuse(Misuse::no_weights,
         "nothing has set the weights: load, initialise or write them, or load a checkpoint");
}

/// The task sets all of them, and moments; it is the first thing that is known of this state. What
/// has come of a step's gradients was of other weights.
void Pager::set_weights(const std::function<void()>& task) {
  forget_weights();
  thread_.run(task);
  drop_gradients();
  weights_set_ = true;
  steps_ = 0;
  for (StoredLayer& layer : stored_) layer.updated = 0;
}

void Pager::drop_gradients() {
  for (StoredLayer& layer : stored_) {
    std::vector<uint32_t> counts(layer.gradient.counts.size());
    layer.gradient = {};
    layer.gradient.counts = std::move(counts);
  }
  for (SumSlot& slot : sum_slots_) slot.layer.reset();  // its uses are known still
  begun_ = false;
  order_.restart();
}

/// Of all weights in the device's memory.
StreamPoints Pager::all_uses() {
  StreamPoints all = ring_.take_uses();
  for (StoredLayer& layer : stored_) append(all, layer.uses.take());
  return all;
}

const LayerTensor& Pager::checked_tensor(const std::string& name, uint64_t count,
                                         uint32_t* layer) const {
  const auto found = registry_.find(name);
  if (!found) refuse(Misuse::unknown_tensor, "no layer has a tensor \"{}\"", name);
  const TensorPlace& place = registry_.layers()[found->first].tensors[found->second];
  if (count != place.elements) {
    refuse(Misuse::size_mismatch, "{}: {} elements; it has {}", name, count, place.elements);
  }
  *layer = place.stored_layer;
  return registry_.stored(place);
}

void Pager::load_weights(const fs::path& path) {
  Lock lock(mutex_);
  require_all_released("loading weights");
  const ModelTensors tensors(path);
  check_model_tensors(layout_.model, tensors);
  settle(lock, "loading weights");
  set_weights([&] {
    overspill::load_weights(store_, tensors);
    thread_.reset({});
  });
}

void Pager::initialize_weights(uint64_t seed, double deviation) {
  Lock lock(mutex_);
  if (!std::isfinite(deviation) || deviation < 0) {
    refuse(Misuse::bad_argument, "a deviation of {}: it is finite and not negative", deviation);
  }
  settle(lock, "initialising weights");
  draw_weights(seed, deviation);
}

void Pager::draw_weights(uint64_t seed, double deviation) {
  set_weights([&] {
    layout_.model.config.initializer_range = deviation;
    overspill::initialize_weights(store_, seed);
    thread_.reset({});
  });
}

void Pager::write_tensor(const std::string& name, const TensorValues& values) {
  Lock lock(mutex_);
  uint32_t layer = 0;
  const LayerTensor& tensor = checked_tensor(name, values.count, &layer);
  settle(lock, "writing a tensor");
  if (!weights_set_) draw_weights(0, 0);  // pages hold more than this tensor
  forget_weights();
  std::vector<float> floats(values.count);
  add_gradient(values.values, values.type, floats.data(), values.count, true);
  thread_.run([&] { overspill::write_tensor(store_, layer, tensor, floats); });
}

void Pager::read_tensor(const std::string& name, void* values, DType type, uint64_t count) {
  Lock lock(mutex_);
  uint32_t layer = 0;
  const LayerTensor& tensor = checked_tensor(name, count, &layer);
  settle(lock, "reading a tensor");
  require_weights();
  forget_weights();
  std::vector<float> floats(count);
  const bool as_computed = type != DType::f32;
  thread_.run([&] { overspill::read_tensor(store_, layer, tensor, as_computed, ranks_, floats); });
  if (type == DType::f32) {
    std::ranges::copy(floats, static_cast<float*>(values));
  } else {
    std::ranges::transform(floats, static_cast<uint16_t*>(values), float_to_bf16);
  }
}

void Pager::export_weights(const fs::path& directory, const std::string& config_json) {
  Lock lock(mutex_);
  const nlohmann::json config = parse_config(config_json);
  settle(lock, "exporting weights");
  require_weights();
  forget_weights();
  thread_.run([&] {
    if (ranks_.first()) fs::create_directories(directory);
    ranks_.world().barrier();
    overspill::export_weights(store_, directory, ranks_);
    if (!config.is_null() && ranks_.first()) {
      write_text_file(directory / "config.json", config.dump(2) + "\n");
    }
  });
}

void Pager::save_checkpoint(const CheckpointOptions& options, const std::string& config_json) {
  Lock lock(mutex_);
  const nlohmann::json config = parse_config(config_json);
  require_utf8(options.user_state);
  settle(lock, "saving a checkpoint");
  require_weights();
  forget_weights();
  save_error_ = nullptr;
  PagerWork work{.kind = Kind::task};
  work.task = [this, options, config] {
    try {
      layout_.model.config.source = config;
      require_shared_output(options.output_dir, ranks_);
      if (ranks_.first()) remove_partial_checkpoints(options.output_dir);
      thread_.settle_moments();
      overspill::save_checkpoint(store_, thread_.position(), options, ranks_);
    } catch (...) {
      if (ranks_.size() > 1) throw;  // the others may wait for this one
      save_error_ = std::current_exception();
    }
  };
  saved_ = thread_.add(std::move(work));
}

bool Pager::poll_checkpoint() {
  const Lock lock(mutex_);
  require_running();
  if (!thread_.done(saved_)) return false;
  if (save_error_) std::rethrow_exception(save_error_);
  return true;
}

void Pager::wait_checkpoint() {
  Lock lock(mutex_);
  require_running();
  const uint64_t saved = saved_;
  lock.unlock();
  thread_.wait(saved);
  lock.lock();
  if (save_error_) std::rethrow_exception(save_error_);
}

void Pager::load_checkpoint(const fs::path& directory) {
  Lock lock(mutex_);
  require_all_released("loading a checkpoint");
  const bool named = fs::exists(fs::symlink_status(directory / "latest"));
  const fs::path from = named ? *latest_checkpoint(directory) : directory;
  settle(lock, "loading a checkpoint");
  std::optional<Checkpoint> checkpoint;
  thread_.run([&] {
    checkpoint = open_checkpoint(from, ranks_);
    check_model_tensors(layout_.model, ModelTensors(checkpoint->directory));
  });
  set_weights([&] {
    overspill::load_checkpoint(store_, *checkpoint);
    thread_.reset(checkpoint->position);
  });
  user_state_ = checkpoint->user_state;
}

std::string Pager::user_state() {
  const Lock lock(mutex_);
  return user_state_;
}

}  // namespace overspill
