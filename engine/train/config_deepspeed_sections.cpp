// Rows of DeepSpeed's sections beside training itself: monitoring, checkpoints, and techniques that
// this trainer does not have.
#include "engine/train/config_deepspeed_rows.h"

namespace overspill {
namespace {

using namespace deepspeed;
using Rows = std::vector<DeepSpeedKey>;

Rows memory_rows() {
  constexpr std::string_view kPages = "boundary activations are pages, moved by the plan";
  return {
      applied("activation_checkpointing.cpu_checkpointing", "offload.activations", host_if_true,
              "true is `host`, else it is chosen by prediction"),
      not_needed("activation_checkpointing.partition_activations", "no layer is split over ranks"),
      not_needed("activation_checkpointing.contiguous_memory_optimization", kPages),
      not_needed("activation_checkpointing.number_checkpoints",
                 "every layer's activations are recomputed"),
      not_needed("activation_checkpointing.synchronize_checkpoint_boundary", kPages),
      not_needed("activation_checkpointing.profile", "`metrics.jsonl` has the time of each lane"),
      refused("data_types.param_dtype", "", "write \"bf16\": {\"enabled\": true} instead"),
      refused("data_types.buffer_dtype", "", "there are no buffers in these models; remove it"),
  };
}

Rows monitoring_rows() {
  constexpr std::string_view kMetrics = "`metrics.jsonl` in output_dir has every step's numbers";
  constexpr std::string_view kLanes = "`metrics.jsonl` has the time and bytes of each lane";
  constexpr std::string_view kLog = "the first lines of a run say it";
  constexpr std::string_view kFile = "enabled output_path job_name";
  return {
      not_needed("wall_clock_breakdown", kLanes),
      not_needed("memory_breakdown", "`metrics.jsonl` has the peaks of memory"),
      not_needed("dump_state", kLog),
      not_needed("log_level", "the log is of one level"),
      not_needed("timers", kLanes, "*"),
      not_needed("flops_profiler", "`metrics.jsonl` has the operations of each step",
                 "enabled recompute_fwd_factor profile_step module_depth top_modules detailed "
                 "output_file"),
      not_needed("comms_logger", kLanes, "enabled verbose prof_all debug prof_ops"),
      not_needed("tensorboard", kMetrics, kFile),
      not_needed("csv_monitor", kMetrics, kFile),
      not_needed("wandb", kMetrics, "enabled group team project"),
      not_needed("comet", kMetrics,
                 "enabled workspace project samples_log_interval experiment_name api_key "
                 "experiment_key online mode"),
      not_needed("vocabulary_size", "the model's config.json says it"),
      not_needed("dataloader_drop_last", "token files are cut into full sequences"),
      not_needed("graph_harvesting", "steps are planned ahead"),
      not_needed("disable_python_gc", "there is no Python"),
      not_needed("use_data_before_expert_parallelism", "there are no experts"),
  };
}

Rows checkpoint_rows() {
  constexpr std::string_view kWhole = "a checkpoint is one directory, checked as a whole";
  return {
      not_needed("checkpoint.tag_validation", kWhole),
      not_needed("checkpoint.load_universal",
                 "every checkpoint resumes with any stage and number of ranks"),
      refused("checkpoint.use_node_local_storage", "false",
              "ranks write one checkpoint into output_dir, which all must reach; write false"),
      not_needed("checkpoint.parallel_write", "all ranks write in parallel", "pipeline_stage"),
      not_needed("checkpoint.writer", "all ranks write in parallel", "*"),
      not_needed("checkpoint.checkpoint_serialization", kWhole),
      refused_section("nebula", "checkpoints are files in output_dir; remove the section",
                      "enabled load_path enable_nebula_load persistent_storage_path "
                      "persistent_time_interval num_of_version_in_retention"),
      not_needed("datastates_ckpt", "checkpoints are files in output_dir", "*"),
  };
}

Rows technique_rows() {
  constexpr std::string_view kAllData = "every sequence is trained on whole; remove the section";
  constexpr std::string_view kOneModel =
      "ranks share data-parallel state, not layers or tensors; remove the section and use "
      "zero_stage 3";
  constexpr std::string_view kFull = "weights are trained whole; remove the section";
  return {
      gated_section(
          "tensor_parallel", "autotp_size", "0|1", kOneModel,
          "autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config "
          "tp_grain_size tp dtype keep_module_on_host"),
      refused_section("expert_parallel", "the model has no experts; remove the section", "*"),
      refused("pipeline", "{}", kOneModel),
      refused("sequence_parallel_size", "1", kOneModel),
      refused_section("elasticity",
                      "the number of ranks stays the same in a run; resume with another instead",
                      "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
                      "version prefer_larger_batch ignore_non_elastic_batch_info "
                      "num_gpus_per_node model_parallel_size"),
      refused_section("autotuning", "run `overspill tune` instead",
                      "enabled results_dir exps_dir overwrite metric start_profile_step "
                      "end_profile_step fast max_train_batch_size mp_size "
                      "num_tuning_micro_batch_sizes tuner_type tuner_early_stopping "
                      "tuner_num_trials arg_mappings min_train_batch_size "
                      "min_train_micro_batch_size_per_gpu max_train_micro_batch_size_per_gpu "
                      "metric_path model_info model_info_path"),
      refused("sparse_attention", "{}", "attention is exact; remove the section"),
      refused_section("progressive_layer_drop", "every layer is trained; remove the section",
                      "enabled theta gamma"),
      refused_section("curriculum_learning", kAllData, "*"),
      refused_section("data_efficiency", kAllData, "enabled seed data_routing data_sampling"),
      refused("compression_training", "{}", kFull),
      refused_section("quantize_training", kFull, "*"),
      refused("weight_quantization", "{}", kFull),
      refused_section("eigenvalue", kFull,
                      "enabled verbose max_iter tol stability gas_boundary_resolution layer_name "
                      "layer_num"),
      refused_section("hybrid_engine", "there is no generation; remove the section",
                      "enabled max_out_tokens inference_tp_size release_inference_cache "
                      "pin_parameters tp_gather_partition_size enable_cuda_graph"),
      gated_section(
          "compile", "deepcompile", "false", "steps are planned, not compiled; write false",
          "enabled backend kwargs deepcompile free_activation free_activation_threshold "
          "offload_activation offload_activation_pin_memory offload_opt_states "
          "double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
          "sync_after_reduce sync_before_allgather sync_after_allgather "
          "keep_int_input_tensors keep_all_input_tensors passes"),
  };
}

}  // namespace

std::vector<DeepSpeedKey> deepspeed::section_rows() {
  Rows all;
  for (const Rows& rows : {memory_rows(), monitoring_rows(), checkpoint_rows(), technique_rows()}) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

}  // namespace overspill
