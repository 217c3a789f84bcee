// Kernels whose time is that of their bytes: each reads and writes arrays of activations once.
#include <fmt/format.h>

#include <numeric>

#include "bench/gpu/sections.h"
#include "engine/model/cuda_kernels.h"
#include "optim/cuda_update.h"

namespace overspill {
namespace {

using bf16 = __nv_bfloat16;

/// Arrays that all kernels share; their values do not matter.
struct Arrays {
  Arrays(GpuBench& bench, const GpuBenchSizes& sizes)
      : rows(sizes.rows),
        width(sizes.width),
        size(rows * width),
        weight(bench.array<bf16>(width)),
        rstd(bench.array<float>(rows)),
        totals(bench.array<double>(rows + width)),
        tokens(bench.array<int32_t>(rows)),
        narrow{bench.array<bf16>(size), bench.array<bf16>(size), bench.array<bf16>(size),
               bench.array<bf16>(size)},
        wide(bench.array<float>(size)) {
    // Every row another one: what the gradient adds to is not in a cache.
    std::vector<int32_t> rows_of_table(rows);
    std::iota(rows_of_table.begin(), rows_of_table.end(), 0);
    bench.upload(tokens, shuffled(rows_of_table, 1).data(), rows * sizeof(int32_t));
    for (bf16* values : narrow) bench.fill_bf16(values, size);
  }

  uint64_t rows, width, size;
  bf16* weight;
  float* rstd;
  double* totals;
  int32_t* tokens;
  bf16* narrow[4];
  float* wide;
};

class KernelList {
 public:
  KernelList(GpuBench& bench, const GpuBenchSizes& sizes)
      : bench_(bench), sizes_(sizes), a_(bench, sizes) {
    add_copy();
    add_embedding();
    add_norms();
    add_elementwise();
    add_conversions();
    add_loss();
    add_sums();
    add_update();
  }

  BenchSection section() {
    const std::vector<double> rates = bench_.measure();
    BenchTable table{.title = "kernels, by the bytes that they must move",
                     .columns = {"kernel", "MB", "us", "GB/s", "of the copy's"},
                     .rows = {}};
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    for (size_t i = 0; i < rates.size(); ++i) {
      const double seconds = bytes_[i] / rates[i], share = rates[i] / rates[0];
      table.rows.push_back({names_[i], fmt::format("{:.0f}", bytes_[i] * 1e-6),
                            fmt::format("{:.1f}", seconds * 1e6), giga(rates[i]),
                            fmt::format("{:.2f}", share)});
      results.push_back({{"kernel", names_[i]},
                         {"bytes", bytes_[i]},
                         {"seconds", seconds},
                         {"bytes_per_second", rates[i]},
                         {"share_of_copy", share}});
    }
    return make_section("kernels", "Kernels", {&table, 1}, {}, {},
                        {{"rows", a_.rows}, {"width", a_.width}, {"results", results}});
  }

 private:
  /// `per_element`: bytes moved of each element of an array of activations.
  void add(const std::string& name, double per_element, const std::function<void()>& launch) {
    add_bytes(name, per_element * static_cast<double>(a_.size), launch);
  }
  void add_bytes(const std::string& name, double bytes, const std::function<void()>& launch) {
    names_.push_back(name);
    bytes_.push_back(bytes);
    bench_.add(name, "GB/s", bytes, launch);
  }

  void add_copy() {
    add("copy on the GPU", 4, [this] {
      bench_.device().enqueue_copy(
          DeviceStream::compute, reinterpret_cast<std::byte*>(a_.narrow[1]),
          reinterpret_cast<const std::byte*>(a_.narrow[0]), a_.size * sizeof(bf16));
    });
  }

  void add_embedding() {
    const auto* table = bench_.array<bf16>(sizes_.table_rows * a_.width);
    auto* sums = bench_.array<float>(sizes_.table_rows * a_.width);
    auto* workspace = bench_.array<std::byte>(cuda::embed_gradient_workspace_bytes(a_.rows));
    add("embed", 4, [=, this] {
      cuda::embed(bench_.stream(), a_.tokens, table, a_.narrow[0], a_.rows, a_.width);
    });
    add("embed_gradient", 10, [=, this] {
      cuda::embed_gradient(bench_.stream(), a_.tokens, a_.narrow[0], sums, workspace, a_.rows,
                           a_.width);
    });
  }

  void add_norms() {
    constexpr float kEpsilon = 1e-5f;
    bf16 *const x = a_.narrow[0], *const y = a_.narrow[2], *const dx = a_.narrow[3];
    auto* dw = bench_.array<float>(a_.width);
    auto* workspace =
        bench_.array<std::byte>(cuda::rms_norm_gradient_workspace_bytes(a_.rows, a_.width));
    add("rms_norm", 4, [=, this] {
      cuda::rms_norm(bench_.stream(), x, a_.weight, kEpsilon, y, a_.rstd, a_.rows, a_.width);
    });
    add("rms_norm_gradient", 8, [=, this] {
      cuda::rms_norm_gradient<bf16>(bench_.stream(), x, a_.weight, a_.rstd, y, dx, dw, workspace,
                                    {}, a_.rows, a_.width);
    });
  }

  void add_elementwise() {
    const auto [gate, up, y, x] = a_.narrow;
    const uint64_t heads = a_.width / sizes_.head_dim;
    auto* angles = bench_.array<float>(a_.rows * sizes_.head_dim);
    add("rotate", 4, [=, this] {
      cuda::rotate(bench_.stream(), x, angles, 1, a_.rows, heads, sizes_.head_dim, false);
    });
    add("swiglu", 6, [=, this] { cuda::swiglu(bench_.stream(), gate, up, y, a_.size); });
    add("swiglu_gradient", 10,
        [=, this] { cuda::swiglu_gradient(bench_.stream(), gate, up, y, a_.size); });
    add("add", 6, [=, this] { cuda::add(bench_.stream(), gate, y, a_.size); });
    add("add to float32", 10, [=, this] { cuda::add(bench_.stream(), gate, a_.wide, a_.size); });
    add("scale", 4, [=, this] { cuda::scale(bench_.stream(), x, 0.5f, a_.size); });
    add("fill_zero", 2, [=, this] { cuda::fill_zero(bench_.stream(), x, a_.size); });
  }

  void add_conversions() {
    add("float_to_bf16", 6,
        [this] { cuda::float_to_bf16(bench_.stream(), a_.wide, a_.narrow[3], a_.size); });
    add("float_to_bf16 in place", 6, [this] {
      cuda::float_to_bf16(bench_.stream(), a_.wide, reinterpret_cast<bf16*>(a_.wide), a_.size);
    });
    add("bf16_to_float", 6,
        [this] { cuda::bf16_to_float(bench_.stream(), a_.narrow[3], a_.wide, a_.size); });
  }

  void add_loss() {
    const uint64_t rows = sizes_.loss_rows, words = sizes_.vocabulary;
    auto* logits = bench_.array<bf16>(rows * words);
    auto* loss = bench_.array<float>(rows);
    auto* targets = bench_.array<int32_t>(rows);
    const std::vector<int32_t> first(rows, 0);
    bench_.upload(targets, first.data(), rows * sizeof(int32_t));
    bench_.fill_bf16(logits, rows * words);
    add_bytes("cross_entropy", static_cast<double>(rows * words) * 4, [=, this] {
      cuda::cross_entropy(bench_.stream(), logits, targets, 1.0f, loss, rows, words);
    });
  }

  void add_sums() {
    auto* squares = bench_.array<std::byte>(cuda::sum_of_squares_workspace_bytes(a_.size));
    auto* both =
        bench_.array<std::byte>(cuda::row_column_squares_workspace_bytes(a_.rows, a_.width));
    add("sum_of_squares", 2, [=, this] {
      cuda::sum_of_squares(bench_.stream(), a_.narrow[0], a_.size, a_.totals, false, squares);
    });
    add("row_column_squares", 4, [=, this] {
      cuda::row_column_squares(bench_.stream(), a_.wide, a_.rows, a_.width, a_.totals,
                               a_.totals + a_.rows, both);
    });
  }

  /// AdamW with split masters and float32 moments: 14 bytes read and 12 written.
  void add_update() {
    const OptimizerSettings settings{};
    auto* state = bench_.array<std::byte>(state_layout(settings, a_.size, 0).bytes);
    const UpdateChunk chunk{.weight = reinterpret_cast<std::byte*>(a_.narrow[0]),
                            .state = state,
                            .gradient = reinterpret_cast<const std::byte*>(a_.narrow[1]),
                            .parameters = a_.size,
                            .exact = 0,
                            .layer = 0,
                            .first = 0};
    const double rates[] = {1e-3};
    const UpdateStep step = update_step(settings, rates, 1, 1.0);
    add("update, adamw", 26, [=, this] {
      const UpdateRun all{.begin = 0, .end = chunk.parameters};
      cuda::update_chunk(bench_.stream(), settings, step, chunk, {&all, 1}, false);
    });
  }

  GpuBench& bench_;
  const GpuBenchSizes& sizes_;
  Arrays a_;
  std::vector<std::string> names_;
  std::vector<double> bytes_;
};

}  // namespace

BenchSection kernels_section(GpuBench& bench, const GpuBenchSizes& sizes) {
  bench.reset();
  return KernelList(bench, sizes).section();
}

}  // namespace overspill
