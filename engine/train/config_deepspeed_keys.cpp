// One row for each key of DeepSpeed's documentation and of the configurations that people have.
#include "engine/train/config_deepspeed_rows.h"

namespace overspill {
namespace {

using namespace deepspeed;
using Rows = std::vector<DeepSpeedKey>;

Rows batch_rows() {
  return {
      applied("train_batch_size", "train_batch_size", as_it_is,
              "micro-batch times accumulation times ranks, checked or solved for what is missing"),
      applied("train_micro_batch_size_per_gpu", "micro_batch_size", as_it_is),
      applied("gradient_accumulation_steps", "gradient_accumulation_steps", as_it_is),
      refused("managed_gradient_accumulation", "true",
              "the trainer counts micro-batches itself; write true"),
      applied("steps_per_print", "logging_steps", as_it_is),
      applied("gradient_clipping", "max_grad_norm", as_it_is),
  };
}

Rows optimizer_rows() {
  constexpr std::string_view kOneBit =
      "it belongs to 1-bit optimizers, which there are not; remove it";
  constexpr std::string_view kKernel = "there is one implementation of each rule";
  return {
      applied("optimizer.type", "optimizer", optimizer_type,
              "Adam and AdamW are `adamw`, Lion is `lion`, SGD is `sgd`; others are refused"),
      applied("optimizer.params.lr", "learning_rate", as_it_is),
      applied("optimizer.params.betas", "adam_beta1, adam_beta2", betas),
      applied("optimizer.params.eps", "adam_epsilon", as_it_is),
      applied("optimizer.params.weight_decay", "weight_decay", as_it_is,
              "of matrices; norms and biases do not decay"),
      applied("optimizer.params.momentum", "sgd_momentum", as_it_is),
      applied("optimizer.params.max_grad_norm", "max_grad_norm", as_it_is),
      refused("optimizer.params.adam_w_mode", "true",
              "weight decay is AdamW's, not added to the gradient; write true"),
      refused("optimizer.params.bias_correction", "true",
              "moments are always corrected; write true"),
      refused("optimizer.params.amsgrad", "false", "there is no AMSGrad; write false"),
      refused("optimizer.params.maximize", "false", "losses are minimized; write false"),
      refused("optimizer.params.nesterov", "false", "momentum is the plain one; write false"),
      refused("optimizer.params.dampening", "0", "momentum is not dampened; write 0"),
      not_needed("optimizer.params.torch_adam", kKernel),
      not_needed("optimizer.params.fused", kKernel),
      not_needed("optimizer.params.foreach", kKernel),
      not_needed("optimizer.params.fp32_optimizer_states",
                 "`optimizer_state` says how moments are kept, float32 by default"),
      refused("optimizer.params.freeze_step", "", kOneBit),
      refused("optimizer.params.var_freeze_step", "", kOneBit),
      refused("optimizer.params.cuda_aware", "", kOneBit),
      refused("optimizer.params.comm_backend_name", "", kOneBit),
      not_needed("optimizer.legacy_fusion", kKernel),
      not_needed("zero_allow_untested_optimizer", "every optimizer works with every stage"),
      not_needed("zero_force_ds_cpu_optimizer", kKernel),
  };
}

Rows scheduler_rows() {
  constexpr std::string_view kFromZero = "the warm-up starts at 0; write 0";
  return {
      applied("scheduler.type", "lr_scheduler", scheduler_type,
              "WarmupLR is `constant`, WarmupDecayLR `linear`, WarmupCosineLR `cosine`; OneCycle "
              "and LRRangeTest are refused"),
      applied("scheduler.params.warmup_max_lr", "learning_rate", as_it_is),
      applied("scheduler.params.warmup_num_steps", "warmup_steps", as_it_is),
      applied("scheduler.params.total_num_steps", "max_steps", as_it_is,
              "a schedule ends where the run does"),
      refused("scheduler.params.warmup_min_lr", "0", kFromZero),
      refused("scheduler.params.warmup_min_ratio", "0", kFromZero),
      refused("scheduler.params.cos_min_ratio", "0", "the cosine ends at 0; write 0"),
      refused("scheduler.params.warmup_type", "\"linear\"",
              "the warm-up is linear; write \"linear\""),
      refused("scheduler.params.last_batch_iteration", "-1",
              "a resumed run continues its schedule by itself; remove it"),
  };
}

Rows precision_rows() {
  constexpr std::string_view kSettings =
      "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
      "consecutive_hysteresis min_loss_scale fused_mode fp16_master_weights_and_grads";
  constexpr std::string_view kWriteBf16 =
      "float16 is not supported; write \"bf16\": {\"enabled\": true} instead";
  return {
      applied("bf16.enabled", "precision", bf16_enabled, "true is `bf16`, false is `float32`"),
      refused("bf16.bf16_master_weights_and_grads", "false",
              "masters are exact and gradients float32, wherever they lie; write false"),
      applied("bf16.bf16_optimizer_states", "optimizer_state", bf16_states,
              "true is `bfloat16`, false is `float32`"),
      not_needed("bf16.immediate_grad_update", "gradients are added up as they are made"),
      not_needed("bf16.check_grad_overflow", "gradients are always checked for being finite"),
      not_needed("bf16.loss_scale", "bf16 needs no loss scale"),
      applied("bfloat16.enabled", "precision", bf16_enabled, "the old name of bf16"),
      refused_section("fp16", kWriteBf16, kSettings),
      refused_section("amp", kWriteBf16, "*"),
      refused_section("torch_autocast",
                      "there is no torch; write \"bf16\": {\"enabled\": true} instead",
                      "enabled dtype lower_precision_safe_modules"),
      refused("data_types.grad_accum_dtype", "\"fp32\"",
              "gradients add up in float32; write \"fp32\""),
      applied("communication_data_type", "reduce_dtype", data_type,
              "fp32 is `float32`, bf16 is `bf16`; fp16 is refused"),
      applied("fp32_allreduce", "reduce_dtype", float32_if_true,
              "true is `float32`, else it is chosen by precision"),
      refused("gradient_allreduce_op", "\"mean\"",
              "gradients are means over the global batch; write \"mean\""),
      not_needed("prescale_gradients", "sums are float32 and do not overflow"),
      not_needed("gradient_predivide_factor", "sums are float32 and do not overflow"),
      not_needed("sparse_gradients", "gradients travel dense, which gives the same sums"),
      not_needed("disable_allgather", "weights are gathered as the stage needs"),
      not_needed("allgather_size", "collectives are one layer each"),
      not_needed("seq_parallel_comm_data_type", "sequences are not split over ranks"),
      not_needed("seq_parallel_communication_data_type", "sequences are not split over ranks"),
  };
}

Rows zero_rows() {
  constexpr std::string_view kLayer = "collectives are one layer each";
  constexpr std::string_view kPlan = "the plan says ahead what is loaded, kept and dropped";
  constexpr std::string_view kExport = "an export is always one whole model";
  constexpr std::string_view kQuantized =
      "weights and gradients travel unquantized; remove it (`reduce_dtype: bf16` halves gradients)";
  return {
      applied("zero_optimization.stage", "zero_stage", as_it_is),
      not_needed("zero_optimization.overlap_comm", "collectives always run on their own lane"),
      not_needed("zero_optimization.reduce_scatter", "the stage says what gradients need"),
      not_needed("zero_optimization.reduce_bucket_size", kLayer),
      not_needed("zero_optimization.allgather_partitions", "the stage says what weights need"),
      not_needed("zero_optimization.allgather_bucket_size", kLayer),
      not_needed("zero_optimization.use_multi_rank_bucket_allreduce", kLayer),
      not_needed("zero_optimization.contiguous_gradients", "a layer's gradients are one buffer"),
      not_needed("zero_optimization.compute_grad_norm", "the norm is part of every step's line"),
      not_needed("zero_optimization.load_from_fp32_weights", "masters start from the file's bits"),
      refused("zero_optimization.elastic_checkpoint", "false",
              "every checkpoint resumes with any number of ranks; remove it"),
      not_needed("zero_optimization.sub_group_size",
                 "`offload.chunk_parameters` is chosen for the drives"),
      not_needed("zero_optimization.round_robin_gradients", "every rank moves its own shard"),
      not_needed("zero_optimization.parameter_alignment", "shards are aligned"),
      not_needed("zero_optimization.ignore_unused_parameters",
                 "`unfrozen_parameters` says what trains"),
      not_needed("zero_optimization.legacy_stage1", "there is one stage 1"),
      not_needed("zero_optimization.stage3_max_live_parameters", kPlan),
      not_needed("zero_optimization.stage3_max_reuse_distance", kPlan),
      not_needed("zero_optimization.stage3_prefetch_bucket_size",
                 "`offload.prefetch_depth` is chosen by prediction"),
      not_needed("zero_optimization.prefetch_bucket_size",
                 "`offload.prefetch_depth` is chosen by prediction"),
      not_needed("zero_optimization.stage3_param_persistence_threshold", kLayer),
      not_needed("zero_optimization.param_persistence_threshold", kLayer),
      not_needed("zero_optimization.stage3_model_persistence_threshold", kLayer),
      not_needed("zero_optimization.model_persistence_threshold", kLayer),
      not_needed("zero_optimization.stage3_module_granularity_threshold", kLayer),
      not_needed("zero_optimization.stage3_use_all_reduce_for_fetch_params", kLayer),
      not_needed("zero_optimization.stage3_allgather_sequential", kLayer),
      not_needed("zero_optimization.stage3_partition_stream_chunk_size",
                 "weights are read a shard at a time"),
      not_needed("zero_optimization.stage3_gather_16bit_weights_on_model_save", kExport),
      not_needed("zero_optimization.stage3_gather_fp16_weights_on_model_save", kExport),
      not_needed("zero_optimization.gather_16bit_weights_on_model_save", kExport),
      applied("zero_optimization.zero_hpz_partition_size", "hybrid_shard", group_size,
              "1 is none; groups share all state, not only a second copy of weights"),
      applied("zero_optimization.mics_shard_size", "hybrid_shard", group_size, "-1 is none"),
      not_needed("zero_optimization.mics_hierarchical_params_gather",
                 "groups gather inside of themselves"),
      refused("zero_optimization.zero_quantized_weights", "false", kQuantized),
      refused("zero_optimization.zero_quantized_nontrainable_weights", "false", kQuantized),
      refused("zero_optimization.zero_quantized_gradients", "false", kQuantized),
      refused("zero_optimization.zeropp_loco_param", "{}", kQuantized),
      refused("zero_optimization.zenflow", "{}", "updates are exact, none is postponed; remove it"),
      not_needed("zero_optimization.memory_efficient_linear", "activations are recomputed"),
      not_needed("zero_optimization.override_module_apply", "there are no torch modules"),
      not_needed("zero_optimization.pipeline_loading_checkpoint", "each rank reads its shard"),
      not_needed("zero_optimization.leaf_module", "there are no torch modules", "*"),
      not_needed("zero_optimization.log_trace_cache_warnings", kPlan),
      not_needed("zero_optimization.enable_sanity_checks", "every program is verified"),
      not_needed("zero_optimization.save_muon_momentum_buffer_in_memory", "there is no Muon"),
      applied("zero_optimization.cpu_offload", "offload.optimizer", host_if_true,
              "true is `host`, else it is chosen by prediction"),
      applied("zero_optimization.cpu_offload_param", "offload.weights", host_if_true,
              "true is `host`, else it is chosen by prediction"),
      not_needed("zero_optimization.cpu_offload_use_pin_memory", "host memory is always pinned"),
  };
}

Rows offload_rows() {
  constexpr std::string_view kDevices = "cpu is `host`, nvme is `nvme`, none is `device`";
  constexpr std::string_view kOnlyNvme =
      "used with \"device\": \"nvme\"; two paths are striped over";
  constexpr std::string_view kPinned = "host memory is always pinned";
  constexpr std::string_view kSlots = "slots follow from the plan and `offload.host_memory`";
  constexpr std::string_view kOverlap = "reads, updates and writes always overlap";
  constexpr std::string_view kThreads = "all cores update";
  return {
      applied("zero_optimization.offload_optimizer.device", "offload.optimizer", device, kDevices),
      applied("zero_optimization.offload_optimizer.nvme_path", "offload.nvme_paths", nvme_path,
              kOnlyNvme),
      not_needed("zero_optimization.offload_optimizer.pin_memory", kPinned),
      not_needed("zero_optimization.offload_optimizer.buffer_count", kSlots),
      not_needed("zero_optimization.offload_optimizer.buffer_size", kSlots),
      not_needed("zero_optimization.offload_optimizer.fast_init",
                 "first states are written as all others are"),
      not_needed("zero_optimization.offload_optimizer.pipeline", kOverlap),
      not_needed("zero_optimization.offload_optimizer.pipeline_read", kOverlap),
      not_needed("zero_optimization.offload_optimizer.pipeline_write", kOverlap),
      refused(
          "zero_optimization.offload_optimizer.ratio", "1",
          "layers are divided over tiers by prediction: remove \"device\" and write `optimizer: "
          "auto` under `offload:` in the YAML file"),
      not_needed("zero_optimization.offload_optimizer.super_offload", kOverlap),
      not_needed("zero_optimization.offload_optimizer.convert_grad_on_cpu",
                 "gradients are float32 as they are made"),
      not_needed("zero_optimization.offload_optimizer.cpuadam_cores_perc", kThreads),
      applied("zero_optimization.offload_param.device", "offload.weights", device, kDevices),
      applied("zero_optimization.offload_param.nvme_path", "offload.nvme_paths", nvme_path,
              kOnlyNvme),
      not_needed("zero_optimization.offload_param.pin_memory", kPinned),
      not_needed("zero_optimization.offload_param.buffer_count", kSlots),
      not_needed("zero_optimization.offload_param.buffer_size", kSlots),
      not_needed("zero_optimization.offload_param.max_in_cpu",
                 "`offload.host_memory` bounds what stays in memory"),
      applied("aio.block_size", "offload.io.block_size", as_it_is),
      applied("aio.queue_depth", "offload.io.queue_depth", as_it_is),
      not_needed("aio.thread_count", "requests are asynchronous"),
      not_needed("aio.intra_op_parallelism", "requests are asynchronous"),
      not_needed("aio.io_backend", "`offload.io.backend` is the first that works"),
      not_needed("aio.single_submit", "requests are submitted in batches"),
      not_needed("aio.overlap_events", "requests always overlap"),
      refused("aio.use_gds", "false", "drives are read through host memory; write false"),
  };
}

}  // namespace

std::span<const DeepSpeedKey> deepspeed_keys() {
  static const Rows kRows = [] {
    Rows all;
    for (const Rows& rows : {batch_rows(), optimizer_rows(), scheduler_rows(), precision_rows(),
                             zero_rows(), offload_rows(), section_rows()}) {
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }();
  return kRows;
}

}  // namespace overspill
