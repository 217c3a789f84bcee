// The update of one layer whose state is on NVMe, beside its parts alone: only its reads, only its
// writes, both at once, only its computation. A pipeline takes as long as its slowest part.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "bench/throttled_io.h"
#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/host_state_math.h"
#include "engine/model/llama.h"
#include "engine/plan/planner.h"
#include "engine/run/executor.h"
#include "engine/train/model_state.h"

namespace {

using namespace overspill;

constexpr const char* kUsage =
    "usage: bench_update_layer --path DIR [--state float32|bfloat16|int8] [--chunk PARAMETERS]\n"
    "                          [--gradients nvme|host] [--rounds 7] [--host-memory 1GiB]\n"
    "                          [--most-rate BYTES_PER_SECOND (of reads, and as much of writes)]\n"
    "One layer of Llama 1B's shape (44 million parameters), bf16 with split masters.\n";

struct Arguments {
  std::filesystem::path path;
  PlanOptions options;
  uint64_t rounds = 7;
  uint64_t most_rate = 0;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  a.options.device_memory = 2 * kGiB;
  a.options.host_memory = kGiB;
  a.options.unified = false;
  a.options.nvme_available = true;
  a.options.micro_batch_tokens = a.options.sequence_len = 64;
  a.options.prefetch_depth = 1;
  a.options.weights = a.options.optimizer = a.options.gradients = Placement::nvme;
  a.options.activations = Placement::device;
  const std::map<std::string, StateFormat> formats = {{"float32", StateFormat::float32},
                                                      {"bfloat16", StateFormat::bfloat16},
                                                      {"int8", StateFormat::int8}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) fail(ErrorCode::invalid_config, "{} needs a value\n{}", name, kUsage);
    const std::string value = argv[i + 1];
    if (name == "--path") {
      a.path = value;
    } else if (name == "--state" && formats.contains(value)) {
      a.options.optimizer_settings.state = formats.at(value);
    } else if (name == "--gradients" && (value == "nvme" || value == "host")) {
      a.options.gradients = value == "host" ? Placement::host : Placement::nvme;
    } else if (name == "--chunk") {
      a.options.chunk_parameters = parse_bytes(value);
    } else if (name == "--rounds") {
      a.rounds = parse_bytes(value);
    } else if (name == "--host-memory") {
      a.options.host_memory = parse_bytes(value);
    } else if (name == "--most-rate") {
      a.most_rate = parse_bytes(value);
    } else {
      fail(ErrorCode::invalid_config, "{} {}: not understood\n{}", name, value, kUsage);
    }
  }
  if (a.path.empty()) fail(ErrorCode::invalid_config, "no --path\n{}", kUsage);
  return a;
}

/// One block of the 1B shape; embedding and head are as small as can be.
ModelShape one_layer() {
  ModelConfig c;
  c.hidden_size = 2048;
  c.intermediate_size = 5632;
  c.num_hidden_layers = 1;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 4;
  c.head_dim = 64;
  c.vocab_size = 2;
  c.max_position_embeddings = 64;
  c.tie_word_embeddings = true;
  return llama_layers(c);
}

/// The Program's ops of some lanes, without waiting for any others.
Program only(const Program& whole, const std::vector<Lane>& lanes) {
  Program part = whole;
  part.ops.clear();
  part.deps.clear();
  for (Op op : whole.ops) {
    if (std::ranges::find(lanes, op.lane) == lanes.end()) continue;
    op.first_dep = op.dep_count = 0;
    part.ops.push_back(op);
  }
  return part;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void measure(const Arguments& a) {
  const ModelShape model = one_layer();
  Llama llama(model, DType::bf16, {1, 64}, host_kernels());
  PlanOptions options = a.options;
  options.compute_scratch_bytes = llama.scratch_bytes();
  const Layout layout = plan_layout(model, options);
  IoOptions io;
  io.verify = false;  // parts alone write what they did not compute
  if (a.most_rate > 0) {
    const auto rate = static_cast<double>(a.most_rate);
    io.wrap = [=](std::unique_ptr<AsyncIo> inner) {  // a channel reads or writes
      return std::make_unique<bench::ThrottledIo>(std::move(inner),
                                                  std::make_shared<bench::RateLimit>(rate));
    };
  }
  PageStore store(layout, {.nvme_paths = {a.path}, .io = io});
  llama.set_scratch(store.address(layout.scratch));
  initialize_weights(store, 1);
  const HostStateMath state(model, host_kernels());
  Executor executor(store, state, &llama);
  StepContext context;
  context.losses.assign(1, 0);
  context.gradient_squares.assign(model.layers.size(), 0);
  const double rates[] = {1e-4};
  context.update = update_step(options.update_rule(), rates, 1, 1.0);
  const auto seconds = [&](const Program& program) {
    return static_cast<double>(executor.run(program, context).end_ns()) * 1e-9;
  };
  const Program first = plan_step(layout, {false, false, true, true, 1});
  const Program whole = plan_step(layout, {false, false, true, false, 1});
  if (a.options.gradients == Placement::nvme) {  // gradients have to be there
    const std::unique_ptr<Channel> channel = store.open_channel();
    for (uint32_t i = 0; i < layout.pages.size(); ++i) {
      const Page& page = layout.pages[i];
      if (page.kind != PageKind::gradient || page.bytes == 0) continue;
      channel->write(std::array{
          Channel::Segment{page.home_offset, store.address(layout.stages[0]), page.bytes}});
    }
  }
  seconds(first);
  seconds(whole);
  const std::vector<std::pair<const char*, Program>> parts = {
      {"read", only(whole, {Lane::nvme_read})},
      {"write", only(whole, {Lane::nvme_write})},
      {"compute", only(whole, {Lane::optimizer})},
      {"read and write at once", only(whole, {Lane::nvme_read, Lane::nvme_write})}};
  std::vector<std::vector<double>> alone(parts.size());
  std::vector<double> together, ratios, limits;
  for (uint64_t round = 0; round < a.rounds; ++round) {
    double longest = 0, limit = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      alone[i].push_back(seconds(parts[i].second));
      if (i < 3) longest = std::max(longest, alone[i].back());
      limit = std::max(limit, alone[i].back());
    }
    together.push_back(seconds(whole));
    ratios.push_back(together.back() / longest);
    limits.push_back(together.back() / limit);
  }
  fmt::print("chunks of {} parameters, {} records, {} stages; {} read, {} written\n",
             layout.chunk_parameters, layout.records.size(), layout.stages.size(),
             format_bytes(whole.lane_bytes(Lane::nvme_read)),
             format_bytes(whole.lane_bytes(Lane::nvme_write)));
  for (size_t i = 0; i < parts.size(); ++i) {
    fmt::print("{:<24} {:7.1f} ms\n", parts[i].first, median(alone[i]) * 1e3);
  }
  fmt::print("{:<24} {:7.1f} ms, {:.3f} of the longest part, {:.3f} with both at once as one\n",
             "update", median(together) * 1e3, median(ratios), median(limits));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    measure(parse(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_update_layer: {}\n", error.what());
    return 1;
  }
  return 0;
}
