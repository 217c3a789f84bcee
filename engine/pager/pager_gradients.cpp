// Gradients of a step: into sums, which are reduced and go their way when they are complete.
#include <algorithm>

#include "engine/base/error.h"
#include "engine/pager/pager.h"

namespace overspill {
namespace {

using Kind = PagerWork::Kind;

}  // namespace

/// How often a tensor's gradient comes in a step: once a micro-batch, and for each tie.
uint32_t Pager::expected_count(uint32_t stored, uint32_t tensor) const {
  return config_.gradient_accumulation_steps * (1 + registry_.ties(stored, tensor));
}

bool Pager::all_there(uint32_t stored) const {
  const LayerShape& shape = layout_.model.layers[stored];
  for (uint32_t t = 0; t < shape.tensors.size(); ++t) {
    const bool missing = stored_[stored].gradient.counts[t] < expected_count(stored, t);
    if (shape.tensors[t].trainable && missing) return false;
  }
  return true;
}

void Pager::require_gradient(uint32_t stored, const std::string& name) const {
  if (in_backward() && !begun_) {
    refuse(Misuse::step_not_started,
           "a gradient of {}, and the step has not begun: with offload.update: in_backward, begin "
           "it with its learning rate first",
           name);
  }
  if (stored_[stored].gradient.complete) {
    refuse(
        Misuse::gradient_complete,
        "a gradient of {}, and this step's is complete already ({} micro-batches); end the step, "
        "or raise gradient_accumulation_steps",
        name, config_.gradient_accumulation_steps);
  }
}

void Pager::submit(uint32_t index, uint32_t tensor, const TensorValues& gradient, void* stream) {
  Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  if (tensor >= layer.tensors.size()) {
    refuse(Misuse::bad_argument, "layer {} \"{}\": tensor {}: it has {}", index, layer.name, tensor,
           layer.tensors.size());
  }
  const TensorPlace& place = layer.tensors[tensor];
  const uint32_t stored = place.stored_layer, t = place.stored_tensor;
  if (!registry_.stored(place).trainable) {
    refuse(Misuse::frozen, "a gradient of {}, which is frozen", place.name);
  }
  if (gradient.count != place.elements) {
    refuse(Misuse::size_mismatch, "a gradient of {} with {} elements; it has {}", place.name,
           gradient.count, place.elements);
  }
  call_gpu([&] { require_reachable(gpu_, gradient.values, "a gradient of " + place.name); });
  begin_adding(lock, stored, stream, [&] {
    require_gradient(stored, place.name);
    require_count(stored, t);
  });
  const bool first = stored_[stored].gradient.counts[t]++ == 0;
  work_on_sums(lock, stored, [&] { add_tensor(stored, t, first, gradient, stream); });
  end_adding(lock, stored);
}

void Pager::submit_flat(uint32_t index, const TensorValues& gradients, void* stream) {
  Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  if (!layer.own || !layout_.model.layers[*layer.own].trainable()) {
    refuse(Misuse::frozen, "gradients of layer {} \"{}\", of whose own parameters none trains",
           index, layer.name);
  }
  const uint32_t stored = *layer.own;
  const LayerShape& shape = layout_.model.layers[stored];
  if (gradients.count != shape.padded) {
    refuse(Misuse::size_mismatch,
           "gradients of layer {} \"{}\" with {} elements; its flattened parameters have {}", index,
           layer.name, gradients.count, shape.padded);
  }
  const std::string name = fmt::format("layer {} \"{}\"", index, layer.name);
  call_gpu([&] { require_reachable(gpu_, gradients.values, "gradients of " + name); });
  begin_adding(lock, stored, stream, [&] {
    require_gradient(stored, name);
    for (uint32_t t = 0; t < shape.tensors.size(); ++t) {
      if (shape.tensors[t].trainable) require_count(stored, t);
    }
  });
  std::vector<char> first;
  for (uint32_t& count : stored_[stored].gradient.counts) first.push_back(count++ == 0);
  const auto* values = static_cast<const std::byte*>(gradients.values);
  work_on_sums(lock, stored, [&] {
    for (uint32_t t = 0; t < shape.tensors.size(); ++t) {
      const LayerTensor& tensor = shape.tensors[t];
      if (!tensor.trainable) continue;
      const std::byte* part = values + tensor.offset * dtype_bytes(gradients.type);
      add_tensor(stored, t, first[t] != 0, {part, gradients.type, tensor.elements}, stream);
    }
  });
  end_adding(lock, stored);
}

void Pager::add_tensor(uint32_t stored, uint32_t t, bool first, const TensorValues& gradient,
                       void* stream) {
  const LayerTensor& tensor = layout_.model.layers[stored].tensors[t];
  SumSlot& slot = slot_of(stored);
  auto* sums = reinterpret_cast<float*>(store_.address(slot.slot));
  slot.uses.begin_on(gpu_, stream);
  state_->add_gradient(stream, gradient.values, gradient.type, sums + tensor.offset,
                       tensor.elements, first);
  slot.uses.end_on(gpu_, stream);
}

/// Of a layer whose sums are in one.
Pager::SumSlot& Pager::slot_of(uint32_t stored) {
  return *std::ranges::find(sum_slots_, stored_[stored].gradient.slot, &SumSlot::slot);
}

void Pager::require_count(uint32_t stored, uint32_t tensor) const {
  const uint32_t count = stored_[stored].gradient.counts[tensor];
  if (count < expected_count(stored, tensor)) return;
  refuse(Misuse::gradient_complete,
         "a gradient of {}, which has come {} times in this step already",
         layout_.model.layers[stored].tensors[tensor].name, count);
}

/// Returns, with the lock, when the layer's sums are in a slot and this thread alone may add.
/// `check` refuses, before anything has changed.
void Pager::begin_adding(Lock& lock, uint32_t stored, void* stream,
                         const std::function<void()>& check) {
  Gradient& gradient = stored_[stored].gradient;
  const auto busy = [&](const SumSlot& s) { return s.layer && stored_[*s.layer].gradient.adding; };
  while (true) {
    require_running();
    check();
    if (!gradient.adding && gradient.sums == Gradient::Sums::slot) break;
    if (!gradient.adding && !std::ranges::all_of(sum_slots_, busy)) break;
    sums_free_.wait(lock);
  }
  if (gradient.sums != Gradient::Sums::slot) return take_slot(lock, stored, stream);
  gradient.adding = true;
  slot_of(stored).last_use = ++sum_clock_;
}

/// A slot that is free once queued work is done, else the one whose layer has waited longest.
Pager::SumSlot& Pager::slot_for_sums(uint32_t stored) {
  SumSlot* oldest = nullptr;
  for (SumSlot& slot : sum_slots_) {
    if (slot.layer && stored_[*slot.layer].gradient.adding) continue;
    const auto rank = [](const SumSlot& s) { return std::pair(s.layer.has_value(), s.last_use); };
    if (oldest == nullptr || rank(slot) < rank(*oldest)) oldest = &slot;
  }
  if (oldest == nullptr || (oldest->layer && !layout_.options.pages_sums(*oldest->layer))) {
    refuse(Misuse::no_slot,
           "a gradient of layer \"{}\", and those of {} other layers are not complete: complete "
           "them (osp_gradients_done), or create the engine with the micro-batch-major loop",
           registry_.owner(stored).name, sum_slots_.size());
  }
  return *oldest;
}

void Pager::take_slot(Lock& lock, uint32_t stored, void* stream) {
  Gradient& gradient = stored_[stored].gradient;
  SumSlot& slot = slot_for_sums(stored);
  if (slot.layer) {
    // The update of the step before takes its gradient from where the sums go.
    catch_up(*slot.layer);
    slot.free = thread_.add({.kind = Kind::store_sums,
                             .layer = *slot.layer,
                             .sums = slot.slot,
                             .after = slot.uses.take()});
    stored_[*slot.layer].gradient.sums = Gradient::Sums::paged;
  }
  const bool paged = gradient.sums == Gradient::Sums::paged;
  slot.layer = stored;
  slot.last_use = ++sum_clock_;
  gradient.sums = Gradient::Sums::slot;
  gradient.slot = slot.slot;
  gradient.adding = true;
  const uint64_t free = slot.free;
  work_on_sums(lock, stored, [&] {
    thread_.wait(free);
    clear_sums(stored, paged, stream);
    if (!paged) return;
    thread_.wait(thread_.add(
        {.kind = Kind::load_sums, .layer = stored, .sums = slot.slot, .after = slot.uses.take()}));
  });
}

/// Work without the lock, by the thread that has the layer's sums. What goes wrong stops the
/// engine, so that the others meet it instead of waiting for the sums.
void Pager::work_on_sums(Lock& lock, uint32_t stored, const std::function<void()>& work) {
  lock.unlock();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (!error) return;
  stored_[stored].gradient.adding = false;
  thread_.stop(error);
  sums_free_.notify_all();
  require_running();
}

/// Padding and frozen tensors count as zero; tensors are set by their first gradient. Where pages
/// hold this rank's part alone, the others' begins again. On a GPU all of it is cleared, so that
/// nothing is left to do for what does not come.
void Pager::clear_sums(uint32_t stored, bool paged, void* stream) {
  SumSlot& slot = slot_of(stored);
  const uint64_t whole = layout_.whole(stored);
  if (gpu_ != nullptr) {
    if (paged && layout_.options.ranks == 1) return;
    slot.uses.begin_on(gpu_, stream);
    gpu_->zero_on(stream, store_.address(slot.slot), whole * sizeof(float));
    return slot.uses.end_on(gpu_, stream);
  }
  auto* sums = reinterpret_cast<float*>(store_.address(slot.slot));
  if (paged) {
    if (layout_.options.ranks > 1) std::fill_n(sums, whole, 0.0f);
    return;
  }
  uint64_t end = 0;
  for (const LayerTensor& tensor : layout_.model.layers[stored].tensors) {
    if (!tensor.trainable) continue;
    std::fill(sums + end, sums + tensor.offset, 0.0f);
    end = tensor.offset + tensor.elements;
  }
  std::fill(sums + end, sums + whole, 0.0f);
}

void Pager::end_adding(Lock&, uint32_t stored) {
  stored_[stored].gradient.adding = false;
  sums_free_.notify_all();  // who is woken waits for the lock
  if (all_there(stored)) complete_gradient(stored);
}

void Pager::gradients_done(uint32_t index) {
  Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  if (!layer.own || !layout_.model.layers[*layer.own].trainable()) {
    refuse(Misuse::frozen, "layer {} \"{}\": none of its own parameters trains", index, layer.name);
  }
  begin_adding(lock, *layer.own, nullptr, [&] {
    require_gradient(*layer.own, fmt::format("layer {} \"{}\"", index, layer.name));
  });
  finish_incomplete(lock, *layer.own);
}

/// What has not come counts as zero. The thread has the sums to itself.
void Pager::finish_incomplete(Lock&, uint32_t stored) {
  Gradient& gradient = stored_[stored].gradient;
  auto* sums = reinterpret_cast<float*>(store_.address(gradient.slot));
  const LayerShape& shape = layout_.model.layers[stored];
  for (uint32_t t = 0; t < shape.tensors.size(); ++t) {
    const LayerTensor& tensor = shape.tensors[t];
    if (gradient.counts[t] > 0 || !tensor.trainable || gpu_ != nullptr) continue;
    std::fill_n(sums + tensor.offset, tensor.elements, 0.0f);
  }
  gradient.adding = false;
  sums_free_.notify_all();
  complete_gradient(stored);
}

void Pager::complete_gradient(uint32_t stored) {
  // The update of the step before takes its gradient from where this one goes.
  catch_up(stored);
  Gradient& gradient = stored_[stored].gradient;
  SumSlot& slot = slot_of(stored);
  PagerWork work{.kind = Kind::finish, .layer = stored, .sums = gradient.slot};
  work.after = slot.uses.take();
  if (in_backward()) choose_place(stored, work);
  const uint64_t ticket = thread_.add(std::move(work));
  if (in_backward()) stored_[stored].ready = ticket;
  slot.layer.reset();
  slot.free = ticket;
  gradient.complete = true;
  gradient.sums = Gradient::Sums::none;
}

}  // namespace overspill
