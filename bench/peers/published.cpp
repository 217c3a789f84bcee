// Published rows and their simulation.
#include "bench/peers/published.h"

#include <algorithm>
#include <array>

#include "engine/forecast/forecast.h"
#include "engine/model/llama.h"
#include "engine/run/simulator.h"
#include "engine/train/plan_request.h"

namespace overspill {
namespace {

constexpr std::array<DeepSpeedRow, 4> kDeepSpeed = {{
    {"52B", 64, 8192, 21824, 64, 44.28e9, 56, 169742336, {0.51, 28.3, 209}},
    {"40B", 128, 5120, 20480, 40, 48.16e9, 64, 152047616, {0.65, 27.5, 214}},
    {"70B", 80, 8192, 28672, 64, 68.61e9, 50, 211816448, {0.77, 32.9, 336}},
    {"100B", 124, 8192, 28672, 64, 105.89e9, 36, 211816448, {1.20, 68.3, 502}},
}};
constexpr uint32_t kDeepSpeedRanks = 4;
constexpr BatchShape kDeepSpeedBatch{1, 2048};

constexpr std::array<LohanRow, 5> kLohan = {
    {{1, 37.5}, {2, 64.3}, {3, 81.1}, {6, 121.7}, {12, 142}}};
constexpr BatchShape kLohanBatch{32, 1024};
constexpr uint64_t kLohanSplit = 4;  // micro-batches under Overspill's schedule

ModelShape llama_model(uint32_t layers, uint32_t hidden, uint32_t ffn, uint32_t heads,
                       uint32_t kv_heads, uint64_t sequence_len) {
  ModelConfig c;
  c.hidden_size = hidden;
  c.intermediate_size = ffn;
  c.num_hidden_layers = layers;
  c.num_attention_heads = heads;
  c.num_key_value_heads = kv_heads;
  c.head_dim = hidden / heads;
  c.vocab_size = 50304;
  c.max_position_embeddings = static_cast<uint32_t>(sequence_len);
  return llama_layers(c);
}

/// Llama-2-13B's blocks, with 12.2 h^2 parameters where GPT's have 12 h^2.
ModelShape lohan_model() { return llama_model(40, 5120, 13824, 40, 40, kLohanBatch.sequence_len); }

PlanOptions batch_options(const BatchShape& batch, uint32_t micro_batches, uint32_t ranks) {
  PlanOptions o;
  o.micro_batches = micro_batches;
  o.micro_batch_tokens = batch.tokens();
  o.sequence_len = batch.sequence_len;
  o.ranks = ranks;
  o.unified = false;
  return o;
}

double seconds_of(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

/// Under Overspill's schedule within the machine's memory.
ForecastRequest overspill_request(const HardwareProfile& hardware, const ModelShape& model,
                                  const BatchShape& batch, uint32_t micro_batches, uint32_t ranks) {
  ForecastRequest request{model, batch_options(batch, micro_batches, ranks), hardware, {}};
  PlanOptions& o = request.options;
  o.compute_scratch_bytes = Llama(model, DType::bf16, batch, host_kernels()).scratch_bytes();
  const auto part = [](uint64_t bytes, double share) {
    return static_cast<uint64_t>(static_cast<double>(bytes) * share) / 4096 * 4096;
  };
  o.device_memory = part(hardware.device.memory, kDevicePart);
  o.host_memory = part(hardware.host.memory, kHostPart / ranks);
  o.nvme_available = true;
  o.nvme_files = hardware.drives.count;
  return request;
}

double automatic_seconds(ForecastRequest request) {
  request.options.weights = request.options.optimizer = request.options.gradients =
      Placement::automatic;
  return make_forecast(request).seconds();
}

}  // namespace

std::span<const DeepSpeedRow> deepspeed_rows() { return kDeepSpeed; }
std::span<const LohanRow> lohan_rows() { return kLohan; }

Layout deepspeed_layout(const DeepSpeedRow& row) {
  const ModelShape model =
      llama_model(row.layers, row.hidden, row.ffn, row.heads, 4, kDeepSpeedBatch.sequence_len);
  return peer_layout(model, batch_options(kDeepSpeedBatch, 1, kDeepSpeedRanks));
}

Layout lohan_layout() { return peer_layout(lohan_model(), batch_options(kLohanBatch, 1, 1)); }

HardwareProfile with_drives(HardwareProfile hardware, uint32_t count) {
  DrivesProfile& d = hardware.drives;
  const double part = static_cast<double>(count) / d.count;
  for (double* rate : {&d.read, &d.write, &d.mixed_read, &d.mixed_write}) *rate *= part;
  d.count = count;
  return hardware;
}

PhaseSeconds simulate_deepspeed(const HardwareProfile& hardware, const DeepSpeedRow& row) {
  const Layout layout = deepspeed_layout(row);
  const Program program = deepspeed_step(layout, row.buffers);
  const Trace trace = simulate(program, cost_model(hardware, layout, kDeepSpeedRanks));
  int64_t forward = 0, backward = 0;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const OpKind kind = program.ops[i].kind;
    const int64_t end = trace.events[i].end_ns;
    if (kind == OpKind::forward) forward = std::max(forward, end);
    if (kind == OpKind::copy_to_host) backward = std::max(backward, end);
  }
  return {seconds_of(forward), seconds_of(backward - forward),
          seconds_of(trace.end_ns() - backward)};
}

double simulate_lohan(const HardwareProfile& hardware) {
  const Layout layout = lohan_layout();
  return seconds_of(simulate(lohan_step(layout), cost_model(hardware, layout)).end_ns());
}

double lohan_tflops(double seconds) {
  const ModelShape model = lohan_model();
  double forward = 0;
  for (uint32_t l = 0; l <= model.head(); ++l) {
    forward += static_cast<double>(
        forward_flops(model, l, kLohanBatch.tokens(), kLohanBatch.sequence_len));
  }
  return 3 * forward / seconds * 1e-12;
}

OverspillSeconds overspill_deepspeed(const HardwareProfile& hardware, const DeepSpeedRow& row) {
  ForecastRequest request =
      overspill_request(hardware, deepspeed_layout(row).model, kDeepSpeedBatch, 1, kDeepSpeedRanks);
  request.options.optimizer = request.options.gradients = Placement::nvme;
  return {make_forecast(request).seconds(), automatic_seconds(request)};
}

OverspillSeconds overspill_lohan(const HardwareProfile& hardware) {
  const BatchShape part{kLohanBatch.sequences / kLohanSplit, kLohanBatch.sequence_len};
  ForecastRequest request = overspill_request(hardware, lohan_model(), part, kLohanSplit, 1);
  request.options.update = UpdateTiming::in_backward;
  request.options.weights = request.options.optimizer = Placement::nvme;
  return {make_forecast(request).seconds(), automatic_seconds(request)};
}

}  // namespace overspill
