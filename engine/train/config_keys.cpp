// The table of keys: name, what is accepted, an example, a sentence, and where the value goes.
// Accepted ranges and defaults are printed from the same numbers that the checks use.
#include "engine/train/config_keys.h"

#include "engine/base/units.h"
#include "engine/train/config_key_rows.h"

namespace overspill {
namespace {

constexpr uint64_t kMost32 = UINT32_MAX;
constexpr const char* kThird = "a third of the machine's memory";

ConfigKey placement(const char* name, Placement OffloadConfig::*member, const char* text) {
  return choice(name, field(member),
                {{"auto", Placement::automatic},
                 {"device", Placement::device},
                 {"host", Placement::host},
                 {"nvme", Placement::nvme}},
                {"host", text});
}

ConfigKey update_key() {
  return {"offload.update",
          "auto, next_forward, twice or in_backward",
          "auto",
          "twice",
          "When a layer is updated; twice: in the next forward, and written in its backward; auto: "
          "each layer by one of these as predicted; in_backward needs max_grad_norm: 0.",
          [](const ConfigValue& value, TrainConfig& config) {
            const std::vector<std::string> names = {"auto", "next_forward", "twice", "in_backward"};
            const std::string& name = names[value_choice(value, names)];
            if (name != "auto") config.offload.update_twice = name == "twice";
            config.offload.update =
                name == "in_backward" ? UpdateTiming::in_backward : UpdateTiming::next_forward;
          }};
}

ConfigKey slots_key(const char* name, std::optional<uint32_t> OffloadConfig::*member,
                    const char* text) {
  return {name,
          "an integer from 1 to 65536, or auto",
          "as many as prefetch_depth needs, in at most a fifth of host_memory",
          "16",
          text,
          [=](const ConfigValue& value, TrainConfig& config) {
            std::optional<uint32_t>& slots = config.offload.*member;
            slots.reset();
            if (!is_auto(value)) slots = static_cast<uint32_t>(value_integer(value, 1, 65536));
          }};
}

ConfigKey dataset_list(const char* name, bool evaluation, const Words& words) {
  return {name,
          "a list of mappings with path, type and split",
          words.unset,
          words.example,
          words.text,
          [=](const ConfigValue& value, TrainConfig& config) {
            apply_datasets(value, config, evaluation);
          }};
}

// ---- the table ----

using Keys = std::vector<ConfigKey>;

void add_file_keys(Keys& keys) {
  keys.push_back({"deepspeed", "a path (relative ones start at the file's directory)", "none",
                  "ds_config.json",
                  "DeepSpeed configuration whose settings hold where this file has none.",
                  [](const ConfigValue& value, TrainConfig&) { value_path(value); }});
}

void add_model_keys(Keys& keys) {
  keys.push_back(path_key(
      "base_model", field(&TrainConfig::base_model),
      {"./Llama-3.2-1B", "Hugging Face directory; required unless init_from_scratch is true.",
       "none, with init_from_scratch"}));
  keys.push_back(
      path_key("base_model_config", field(&TrainConfig::base_model_config),
               {"./config.json", "config.json, or a directory that holds one.", "base_model"}));
  keys.push_back(boolean("init_from_scratch", field(&TrainConfig::init_from_scratch),
                         "Start from random weights of the configured shape."));
  keys.push_back(
      choice("precision", field(&TrainConfig::precision),
             {{"bf16", Precision::bf16}, {"float32", Precision::float32}},
             {"float32", "Type of weights and activations in compute; masters are always exact."}));
}

void add_data_keys(Keys& keys) {
  const std::string item = "[{path: train.bin}]";
  keys.push_back(dataset_list("datasets", false,
                              {item, "Token files or texts; each item has the keys below."}));
  keys.push_back(dataset_list("test_datasets", true,
                              {item, "The same list; all of it is evaluation data.", "none"}));
  keys.push_back({"val_set", "a path (relative ones start at the file's directory)", "none",
                  "val.bin", "One more file of evaluation data, its format detected.",
                  [](const ConfigValue& value, TrainConfig& config) {
                    config.datasets.push_back({.path = value_path(value), .evaluation = true});
                  }});
  keys.push_back(integer("eval_steps", field(&TrainConfig::eval_steps), 0, kMost32,
                         {"100", "Evaluate every so many steps; 0: only at the end."}));
  keys.push_back(integer("eval_max_sequences", field(&TrainConfig::eval_sequences), 1, kMost32,
                         {"64", "Most sequences of one evaluation."}));
  keys.push_back(integer("sequence_len", field(&TrainConfig::sequence_len), 1, 1u << 20,
                         {"1024", "Tokens of one training sequence."}));
  keys.back().unset.clear();  // required
  keys.push_back(boolean("shuffle", field(&TrainConfig::shuffle),
                         "Another order of the sequences in every epoch, drawn from the seed."));
  keys.push_back(integer("seed", field(&TrainConfig::seed), 0, UINT64_MAX,
                         {"1", "Drives the order of sequences and random weights."}));
}

void add_loop_keys(Keys& keys) {
  keys.push_back(integer("micro_batch_size", field(&TrainConfig::micro_batch_size), 1, 65536,
                         {"4", "Sequences of one forward and backward."}));
  keys.push_back(integer("gradient_accumulation_steps",
                         field(&TrainConfig::gradient_accumulation_steps), 1, 65536,
                         {"8", "Micro-batches of one optimizer step."}));
  keys.push_back(integer("max_steps", field(&TrainConfig::max_steps), 1, UINT64_MAX,
                         {"1000", "Optimizer steps; wins over num_epochs.", "by num_epochs"}));
  keys.push_back(real("num_epochs", field(&TrainConfig::num_epochs), {0, 1e6, true},
                      {"3", "Passes over the training data; fractions are fine."}));
  keys.push_back(integer("max_non_finite_steps", field(&TrainConfig::max_non_finite_steps), 1,
                         kMost32,
                         {"3", "Stop after so many skipped (non-finite) updates in a row."}));
}

void add_output_keys(Keys& keys) {
  keys.push_back(path_key("output_dir", field(&TrainConfig::output_dir),
                          {"./out", "Directory of checkpoints, metrics and the final model."}));
  keys.push_back(integer("save_steps", field(&TrainConfig::save_steps), 0, UINT64_MAX,
                         {"500", "Checkpoint every so many steps; 0: only at the end."}));
  keys.push_back(integer("save_total_limit", field(&TrainConfig::save_total_limit), 0, kMost32,
                         {"2", "Most checkpoints kept, the oldest removed; 0: all."}));
  keys.push_back(boolean("save_only_model", field(&TrainConfig::save_only_model),
                         "Save weights without optimizer states: smaller, but no resume."));
  keys.push_back({"resume_from_checkpoint", "true (the newest in output_dir), false, or a path",
                  "false", "true", "Continue a stopped run, bit for bit.", apply_resume});
  keys.push_back(integer("logging_steps", field(&TrainConfig::logging_steps), 1, kMost32,
                         {"10", "Print a line every so many steps."}));
}

void add_offload_keys(Keys& keys) {
  keys.push_back(byte_budget("offload.device_memory", field(&OffloadConfig::device_memory), 4096,
                             {"24GiB", "Hard limit of device memory.", kThird}));
  keys.push_back(byte_budget("offload.host_memory", field(&OffloadConfig::host_memory), 4096,
                             {"64GiB", "Hard limit of pinned host memory.", kThird}));
  keys.push_back(byte_budget(
      "offload.nvme_capacity", field(&OffloadConfig::nvme_capacity), 0,
      {"500GiB", "Hard limit of file space over all nvme_paths.", "what the run needs"}));
  keys.push_back({"offload.nvme_paths", "a path or a list of paths, each named once", "none",
                  "[/mnt/nvme0, /mnt/nvme1]", "Directories on the drives to stripe over.",
                  apply_nvme_paths, [](const TrainConfig& config) {
                    std::vector<std::string> paths;
                    for (const auto& path : config.offload.nvme_paths) {
                      paths.push_back(path.string());
                    }
                    return fmt::format("[{}]", fmt::join(paths, ", "));
                  }});
  keys.push_back(choice("offload.stripe", field(&OffloadConfig::stripe),
                        {{"all", StripeOver::all}, {"local", StripeOver::local}},
                        {"local",
                         "Which nvme_paths to use; local: those on the NUMA node of this "
                         "process's CPUs."}));
  keys.push_back({"offload.nvme_shares", "a list of integers from 1 to 64, one per path, or auto",
                  "auto", "[2, 1]",
                  "Stripes of each path in turn; auto: by measured speed, from 4 GiB on NVMe on.",
                  apply_nvme_shares});
  keys.push_back(boolean("offload.allow_raw_devices", field(&OffloadConfig::allow_raw_devices),
                         "Let nvme_paths name unused block devices, to be overwritten."));
  keys.push_back(placement("offload.weights", &OffloadConfig::weights, "Tier of the weights."));
  keys.push_back(
      placement("offload.optimizer", &OffloadConfig::optimizer, "Tier of masters and moments."));
  keys.push_back(
      placement("offload.gradients", &OffloadConfig::gradients, "Tier of summed gradients."));
  keys.push_back(placement("offload.activations", &OffloadConfig::activations,
                           "Tier of the activations at layer boundaries."));
  keys.push_back({"offload.prefetch_depth", "an integer from 0 to 64, or auto",
                  "1 or 2, as predicted", "2", "Layers loaded ahead of the one in compute.",
                  apply_prefetch_depth});
  keys.push_back({"offload.chunk_parameters", "a multiple of 4096 from 4096 to 1073741824, or auto",
                  "a 32nd of a block, within 1 Mi and 4 Mi; less for small layers", "1048576",
                  "Parameters of one page of optimizer state.", apply_chunk_parameters});
  keys.push_back(slots_key("offload.record_slots", &OffloadConfig::record_slots,
                           "Host slots for pages of optimizer state on their way."));
  keys.push_back(slots_key("offload.stage_slots", &OffloadConfig::stage_slots,
                           "Host slots for chunks of weights and gradients on their way."));
  keys.push_back(update_key());
  keys.push_back(choice("offload.device", field(&OffloadConfig::device),
                        {{"auto", DeviceMode::automatic},
                         {"cuda", DeviceMode::cuda},
                         {"unified", DeviceMode::unified},
                         {"discrete", DeviceMode::discrete}},
                        {"cuda",
                         "What computes: a GPU (that of LOCAL_RANK), or the host, with memory "
                         "shared with the host or apart as a GPU's; auto: a GPU where there is "
                         "one, else unified."}));
  keys.push_back(choice("offload.optimizer_device", field(&OffloadConfig::optimizer_device),
                        {{"auto", OptimizerDevice::automatic},
                         {"cpu", OptimizerDevice::cpu},
                         {"gpu", OptimizerDevice::gpu}},
                        {"cpu",
                         "Which side updates, and so keeps, the optimizer's state of a GPU's "
                         "layers; auto: where the state of a layer is placed."}));
}

void add_io_keys(Keys& keys) {
  // Before the keys of offload.io: the profile gives their defaults.
  keys.push_back(
      {"offload.hardware_profile", "a path (relative ones start at the file's directory)", "none",
       "drives.yaml",
       "Profile that `overspill bench nvme --profile` wrote: rates of the predicted step "
       "time, defaults of offload.io.",
       apply_hardware_profile});
  keys.push_back(
      choice("offload.io.backend", field(&IoOptions::backend),
             {{"auto", IoBackend::automatic},
              {"io_uring", IoBackend::io_uring},
              {"libaio", IoBackend::libaio},
              {"threads", IoBackend::threads}},
             {"threads", "How files are read and written; auto: the first of these that works."}));
  keys.push_back(
      choice("offload.io.poll", field(&IoOptions::poll), {{"auto", true}, {"false", false}},
             {"false", "Poll raw devices that have poll queues for completions; auto: yes."}));
  keys.push_back({"offload.io.block_size", "a multiple of 4096 bytes from 4KiB to 64MiB",
                  format_bytes(IoOptions().block_size), "1MiB", "Largest single request.",
                  apply_block_size, spell_field(field(&IoOptions::block_size))});
  keys.push_back(integer("offload.io.queue_depth", field(&IoOptions::queue_depth), 1, 1024,
                         {"32", "Requests in flight per lane."}));
  keys.push_back(integer("offload.io.write_depth", field(&IoOptions::write_depth), 1, 1024,
                         {"8", "Writes in flight on a drive that also has reads in flight."}));
  keys.push_back(boolean("offload.io.verify", field(&IoOptions::verify),
                         "Check everything read from NVMe against CRC32C sums of what was "
                         "written."));
  keys.push_back(
      {"offload.io.timeout", "a time from 1ms to 24h, such as 500ms, 30s or 5m",
       format_duration(IoOptions().timeout), "30s",
       "Longest time one request may take before the run ends.", apply_io_timeout,
       [](const TrainConfig& config) { return format_duration(config.offload.io.timeout); }});
}

}  // namespace

const std::vector<ConfigKey>& train_keys() {
  static const Keys kKeys = [] {
    Keys keys;
    add_file_keys(keys);
    add_model_keys(keys);
    add_data_keys(keys);
    add_loop_keys(keys);
    add_rank_keys(keys);
    add_optimizer_keys(keys);
    add_output_keys(keys);
    add_offload_keys(keys);
    add_io_keys(keys);
    return keys;
  }();
  return kKeys;
}

const ConfigKey* find_key(std::span<const ConfigKey> keys, std::string_view name) {
  for (const ConfigKey& key : keys) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

bool is_section(std::string_view name) { return name == "offload" || name == "offload.io"; }

}  // namespace overspill
