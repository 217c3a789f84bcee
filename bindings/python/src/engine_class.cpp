// The Python class `Engine`: names, defaults and docstrings of its methods.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "engine.h"
#include "errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace overspill::python {
namespace {

void define_tensor_spec(nb::module_& module) {
  nb::class_<TensorSpec>(module, "TensorSpec",
                         "A tensor of a layer. `decay` None: from rank 2 on. `group`: of learning "
                         "rates. `tied_to`: the tensor of another layer that this one is.")
      .def(
          "__init__",
          [](TensorSpec* self, std::string name, std::vector<uint64_t> shape, osp_dtype_t dtype,
             std::optional<bool> decay, uint32_t group, bool frozen,
             std::optional<std::string> tied_to) {
            new (self) TensorSpec;
            self->name = std::move(name);
            self->shape = std::move(shape);
            self->dtype = dtype;
            self->decay = decay;
            self->group = group;
            self->frozen = frozen;
            self->tied_to = std::move(tied_to);
          },
          "name"_a, "shape"_a, nb::kw_only(), "dtype"_a = OSP_DTYPE_DEFAULT, "decay"_a = nb::none(),
          "group"_a = 0, nb::arg("frozen") = false, "tied_to"_a = nb::none())
      .def_ro("name", &TensorSpec::name)
      .def_ro("shape", &TensorSpec::shape)
      .def_ro("dtype", &TensorSpec::dtype)
      .def_ro("decay", &TensorSpec::decay)
      .def_ro("group", &TensorSpec::group)
      .def_ro("frozen", &TensorSpec::frozen)
      .def_ro("tied_to", &TensorSpec::tied_to);
}

void create(Engine* self, const std::string& configuration, uint32_t rank, uint32_t world_size,
            std::optional<std::string> master_address, std::optional<std::string> device,
            uint32_t held_layers, osp_loop_t loop, uint64_t activation_host_bytes,
            uint64_t activation_nvme_bytes, nb::object log, osp_log_level_t log_level,
            nb::object progress) {
  const EngineArguments arguments{.rank = rank,
                                  .world_size = world_size,
                                  .master_address = std::move(master_address),
                                  .device = std::move(device),
                                  .held_layers = held_layers,
                                  .loop = loop,
                                  .activation_host_bytes = activation_host_bytes,
                                  .activation_nvme_bytes = activation_nvme_bytes,
                                  .log_level = log_level};
  new (self) Engine(configuration, arguments, std::move(log), std::move(progress));
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Engine>(self)->visit(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Engine>(self)->clear();
  return 0;
}

PyType_Slot engine_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear)},
                              {0, nullptr}};

void define_setup(nb::class_<Engine>& engine) {
  engine
      .def("__init__", create, "configuration"_a = "", nb::kw_only(), "rank"_a = 0,
           "world_size"_a = 1, "master_address"_a = nb::none(), "device"_a = nb::none(),
           "held_layers"_a = 1, "loop"_a = OSP_LOOP_MICRO_BATCH_MAJOR,
           "activation_host_bytes"_a = 0, "activation_nvme_bytes"_a = 0, "log"_a = nb::none(),
           "log_level"_a = OSP_LOG_WARNING, "progress"_a = nb::none(),
           "From YAML or JSON text with the training file's keys. `log(level, line)` and "
           "`progress(what, fraction)` are called from any thread; a true value of progress, or "
           "an exception, ends what is under way.")
      .def("close", &Engine::close, "Waits for what is under way and frees everything.")
      .def_prop_ro("closed", &Engine::closed)
      .def("register_layer", &Engine::register_layer, "name"_a, "tensors"_a,
           "Registers tensors that are acquired together; gives the layer's number.")
      .def("set_order", &Engine::set_order, "layers"_a,
           "Declares in which order a step acquires layers; otherwise the first one's is recorded.")
      .def("finalize", &Engine::finalize, "Plans and allocates everything.")
      .def("layer_info", &Engine::layer_info, "layer"_a)
      .def("tensor_info", &Engine::tensor_info, "tensor"_a)
      .def("describe_plan", &Engine::describe_plan, "The plan in sentences.");
}

void define_weights(nb::class_<Engine>& engine) {
  engine
      .def(
          "load_weights",
          [](Engine& self, const std::string& path) {
            call([&] { return osp_load_weights(self.handle(), path.c_str()); });
          },
          "path"_a, "Loads all weights by name from safetensors: a file, or a model's directory.")
      .def(
          "initialize_weights",
          [](Engine& self, uint64_t seed, double deviation) {
            call([&] { return osp_initialize_weights(self.handle(), seed, deviation); });
          },
          "seed"_a, "deviation"_a)
      .def("write_tensor", &Engine::write_tensor, "tensor"_a, "values"_a,
           "Sets a whole tensor from an array in host memory; moments stay.")
      .def("read_tensor", &Engine::read_tensor, "tensor"_a, "out"_a.noconvert(),
           "Fills an array in host memory: float32 with the master, bf16 with compute's weights.")
      .def(
          "export_weights",
          [](Engine& self, const std::string& directory, std::optional<std::string> config_json) {
            call([&] {
              return osp_export_weights(self.handle(), directory.c_str(),
                                        config_json ? config_json->c_str() : nullptr);
            });
          },
          "directory"_a, "config_json"_a = nb::none(), "Writes the weights as safetensors.");
}

void define_use(nb::class_<Engine>& engine) {
  engine
      .def("acquire", &Engine::acquire, "layer"_a, "stream"_a = 0,
           "Holds a layer; gives its tensors' addresses, valid until it is released.")
      .def(
          "prefetch",
          [](Engine& self, uint32_t layer) {
            call([&] { return osp_prefetch(self.handle(), layer); });
          },
          "layer"_a)
      .def("release", &Engine::release, "layer"_a, "stream"_a = 0)
      .def("submit_gradient", &Engine::submit_gradient, "layer"_a, "tensor"_a, "gradient"_a,
           "stream"_a = 0, "Adds one tensor's gradient of one micro-batch.")
      .def("submit_gradients", &Engine::submit_gradients, "layer"_a, "gradients"_a, "stream"_a = 0,
           "The same for a whole layer, flattened.")
      .def(
          "gradients_done",
          [](Engine& self, uint32_t layer) {
            call([&] { return osp_gradients_done(self.handle(), layer); });
          },
          "layer"_a);
}

StepArguments step_arguments(double learning_rate, std::vector<double> learning_rates,
                             double loss_scale, bool allow_missing) {
  return {.learning_rate = learning_rate,
          .learning_rates = std::move(learning_rates),
          .loss_scale = loss_scale,
          .allow_missing = allow_missing};
}

void define_steps(nb::class_<Engine>& engine) {
  const std::vector<double> none;
  engine
      .def(
          "step_begin",
          [](Engine& self, double rate, std::vector<double> rates, double scale, bool missing) {
            self.step_begin(step_arguments(rate, std::move(rates), scale, missing));
          },
          "learning_rate"_a = 0.0, nb::kw_only(), "learning_rates"_a = none, "loss_scale"_a = 1.0,
          nb::arg("allow_missing") = false, "Begins a step whose updates run in the backward.")
      .def(
          "step",
          [](Engine& self, double rate, std::vector<double> rates, double scale, bool missing) {
            self.step(step_arguments(rate, std::move(rates), scale, missing));
          },
          "learning_rate"_a = 0.0, nb::kw_only(), "learning_rates"_a = none, "loss_scale"_a = 1.0,
          nb::arg("allow_missing") = false, "Ends the step and returns at once.")
      .def(
          "step_end", [](Engine& self) { self.step(std::nullopt); },
          "Ends a step that step_begin began.")
      .def("step_poll", &Engine::step_poll, "The last step's result, or None while unknown.")
      .def("step_wait", &Engine::step_wait, "The last step's result.")
      .def(
          "flush", [](Engine& self) { call([&] { return osp_flush(self.handle()); }); },
          "Applies updates that are pending.");
}

void define_checkpoints(nb::class_<Engine>& engine) {
  engine
      .def("save_checkpoint", &Engine::save_checkpoint, "directory"_a, nb::kw_only(),
           "config_json"_a = nb::none(), "user_state"_a = nb::none(), "total_limit"_a = 0,
           nb::arg("only_model") = false, "Saves in the background; see wait_checkpoint.")
      .def(
          "poll_checkpoint",
          [](Engine& self) {
            int32_t done = 0;
            call([&] { return osp_checkpoint_poll(self.handle(), &done); });
            return done != 0;
          },
          "Whether the last checkpoint is there.")
      .def("wait_checkpoint",
           [](Engine& self) { call([&] { return osp_checkpoint_wait(self.handle()); }); })
      .def(
          "load_checkpoint",
          [](Engine& self, const std::string& directory) {
            call([&] { return osp_checkpoint_load(self.handle(), directory.c_str()); });
          },
          "directory"_a)
      .def_prop_ro("user_state", &Engine::user_state)
      .def("statistics", &Engine::statistics)
      .def("trace_start",
           [](Engine& self) { call([&] { return osp_trace_start(self.handle()); }); })
      .def(
          "trace_write",
          [](Engine& self, const std::string& path) {
            call([&] { return osp_trace_write(self.handle(), path.c_str()); });
          },
          "path"_a);
}

void define_activations(nb::class_<Engine>& engine) {
  engine
      .def(
          "save_activation",
          [](Engine& self, const Array& buffer, uintptr_t stream) {
            self.require_reachable(buffer);
            osp_activation_t activation = 0;
            call([&] {
              return osp_activation_save(self.handle(), buffer.data(), buffer.nbytes(),
                                         reinterpret_cast<void*>(stream), &activation);
            });
            return activation;
          },
          "buffer"_a, "stream"_a = 0, "Takes a copy of an array into the tiers.")
      .def(
          "prefetch_activation",
          [](Engine& self, osp_activation_t activation) {
            call([&] { return osp_activation_prefetch(self.handle(), activation); });
          },
          "activation"_a)
      .def(
          "restore_activation",
          [](Engine& self, osp_activation_t activation, const WritableArray& buffer,
             uintptr_t stream) {
            self.require_reachable(buffer);
            call([&] {
              return osp_activation_restore(self.handle(), activation, buffer.data(),
                                            buffer.nbytes(), reinterpret_cast<void*>(stream));
            });
          },
          "activation"_a, "buffer"_a.noconvert(), "stream"_a = 0, "Copies it back and forgets it.")
      .def(
          "discard_activation",
          [](Engine& self, osp_activation_t activation) {
            call([&] { return osp_activation_discard(self.handle(), activation); });
          },
          "activation"_a)
      .def(
          "allocate",
          [](Engine& self, uint64_t bytes, int32_t node) {
            void* memory = nullptr;
            call([&] { return osp_memory_allocate(self.handle(), bytes, node, &memory); });
            return reinterpret_cast<uintptr_t>(memory);
          },
          "bytes"_a, "node"_a = -1, "Address of pinned host memory bound to a NUMA node.")
      .def(
          "free",
          [](Engine& self, uintptr_t memory) {
            // NOLINTNEXTLINE: an address that allocate gave
            call([&] { return osp_memory_free(self.handle(), reinterpret_cast<void*>(memory)); });
          },
          "memory"_a);
}

}  // namespace

void define_engine(nb::module_& module) {
  define_tensor_spec(module);
  nb::class_<Engine> engine(module, "Engine", nb::is_weak_referenceable(),
                            nb::type_slots(engine_slots),
                            "Keeps a model's state in device memory, host memory and on NVMe, "
                            "brings layers to where they are computed with, and updates them.");
  define_setup(engine);
  define_weights(engine);
  define_use(engine);
  define_steps(engine);
  define_checkpoints(engine);
  define_activations(engine);
  module.def("view_memory", &view_memory, "address"_a, "shape"_a, "dtype"_a, "owner"_a,
             nb::kw_only(), nb::arg("numpy") = true, nb::arg("writable") = false,
             "cuda_device"_a = -1,
             "Memory of the engine as an array: of NumPy, or with DLPack for other frameworks.");
}

}  // namespace overspill::python
