// Gathers what each rank has, and divides it.
#include "engine/train/rank_setup.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/collective/cuda_nccl_stream.h"
#include "engine/collective/gloo_collective.h"
#include "engine/collective/nccl_collective.h"
#include "offload/drive_locality.h"
#include "offload/rank_placement.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

/// This rank among those that have the same, on its host.
struct Turn {
  uint32_t index = 0, count = 0;
  std::vector<uint32_t> ranks{};  ///< their numbers in the run
};

/// `own` is what ranks of this host may have in common.
template <class T>
Turn turn_among(const T& own, const Ranks& ranks) {
  const std::vector<T> all = ranks.gather(own);
  Turn turn;
  for (uint32_t other = 0; other < ranks.size(); ++other) {
    const bool same = ranks.hosts()[other] == ranks.hosts()[ranks.rank()] && all[other] == own;
    if (!same) continue;
    turn.index += other < ranks.rank();
    ++turn.count;
    turn.ranks.push_back(other);
  }
  return turn;
}

bool is_device(const fs::path& path) {
  std::error_code ignored;
  return fs::is_block_file(path, ignored);
}

/// A file by which ranks see that they share the output directory.
constexpr std::string_view kMark = ".ranks-";

uint64_t hash_of(const std::string& text) { return std::hash<std::string>()(text); }

/// A GPU's PCI address, or nothing: CUDA's numbers differ between processes.
using GpuAddress = std::array<char, 32>;

GpuAddress address_of(const CudaGpu& gpu) {
  GpuAddress address{};
  gpu.pci.copy(address.data(), address.size() - 1);
  return address;
}

/// Of the GPU that gpu_of_local_rank() will give the rank; nothing where that refuses, or where the
/// host computes.
GpuAddress expected_gpu(const TrainConfig& config, const RankIdentity& rank) {
  const DeviceMode device = config.offload.device;
  if (device != DeviceMode::automatic && device != DeviceMode::cuda) return {};
  const std::vector<CudaGpu> gpus = cuda_devices().gpus;
  if (rank.local_rank < gpus.size()) return address_of(gpus[rank.local_rank]);
  return gpus.size() == 1 ? address_of(gpus[0]) : GpuAddress{};
}

std::string text_of(std::span<const uint32_t> numbers) {
  return fmt::format("{}", fmt::join(numbers, ","));
}

}  // namespace

Ranks::Options ranks_options(const TrainConfig& config) {
  return {.zero_stage = config.zero_stage,
          .hybrid_shard = config.hybrid_shard,
          .timeout = config.rank_timeout,
          .config = config.fingerprint};
}

void check_backend(const TrainConfig& config, bool on_gpu) {
  if (!on_gpu && config.collective_backend == CollectiveBackend::nccl) {
    fail(ErrorCode::invalid_config,
         "collective_backend: nccl moves data between GPUs, and this run's device is the host; set "
         "it to gloo or auto");
  }
  if (on_gpu && config.collective_backend == CollectiveBackend::gloo) {
    fail(ErrorCode::invalid_config,
         "collective_backend: gloo moves data between hosts' memories, and this run's device is a "
         "GPU; set it to nccl or auto, or offload.device to unified");
  }
}

void require_own_gpus(const Ranks& ranks, std::optional<uint32_t> gpu) {
  if (ranks.size() == 1) return;
  const std::vector<GpuAddress> all =
      ranks.gather(gpu ? address_of(cuda_devices().gpus.at(*gpu)) : GpuAddress{});
  const auto& hosts = ranks.hosts();
  for (uint32_t second = 1; second < ranks.size(); ++second) {
    for (uint32_t first = 0; first < second; ++first) {
      if (all[second][0] == '\0' || all[first] != all[second] || hosts[first] != hosts[second]) {
        continue;
      }
      fail(ErrorCode::invalid_config,
           "ranks {} and {} of one host have the same GPU, {}, and each rank needs one of its own; "
           "let CUDA_VISIBLE_DEVICES show another one to each of them, or all to every rank",
           first, second, all[first].data());
    }
  }
}

namespace {

/// Memory of the GPU that NCCL's groups use: a place for each group.
std::array<uint64_t, 2> group_staging(const TrainConfig& config, const RankIdentity& rank) {
  const uint32_t shard = shard_group_size(config.zero_stage, config.hybrid_shard, rank);
  std::array<uint64_t, 2> bytes{};
  const std::array<uint32_t, 2> sizes = {shard, rank.ranks / shard};
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1) bytes[i] = round_up(nccl_staging_bytes(sizes[i]), 4096);
  }
  return bytes;
}

}  // namespace

uint64_t gpu_staging_bytes(const TrainConfig& config, const RankIdentity& rank) {
  const auto [shard, replicas] = group_staging(config, rank);
  return shard + replicas;
}

GpuGroups::GpuGroups(const TrainConfig& config, const Ranks& ranks, CudaDevice& device,
                     std::byte* staging)
    : stream_(make_cuda_nccl_stream(device, cuda_reduction_kernels())),
      groups_(ranks, [&, bytes = group_staging(config, ranks.identity()),
                      at = size_t{0}](const CollectiveGroup& group) mutable {
        // A group of one rank has no place.
        while (bytes[at] == 0) ++at;
        const std::span<std::byte> place(staging, bytes[at++]);
        staging += place.size();
        return make_nccl_collective(
            group, *stream_,
            {.deterministic = config.deterministic_reduction, .deferred = true, .staging = place});
      }) {}

std::unique_ptr<GpuGroups> make_gpu_groups(const TrainConfig& config, const Ranks& ranks,
                                           Device& device, std::byte* staging) {
  auto* const gpu = dynamic_cast<CudaDevice*>(&device);
  if (gpu == nullptr || ranks.size() == 1) return nullptr;
  return std::make_unique<GpuGroups>(config, ranks, *gpu, staging);
}

void share_state(const TrainConfig& config, const RankIdentity& rank, PlanOptions& o) {
  const uint32_t group = shard_group_size(config.zero_stage, config.hybrid_shard, rank);
  o.ranks = group;
  o.rank = rank.rank % group;
  o.replicas = rank.ranks / group;
  o.replica = rank.rank / group;
  o.shard_weights = config.zero_stage == 3;
  o.reduce_type = config.reduce_dtype.value_or(
      config.precision == Precision::bf16 ? ReduceType::bf16 : ReduceType::float32);
  if (rank.ranks == 1) return;
  // The groups' buffers are host memory that no slot holds.
  uint64_t staging = 0;
  for (const uint32_t size : {rank.ranks, o.ranks, o.replicas}) {
    if (size > 1) staging += gloo_staging_bytes(size);
  }
  o.host_memory -= std::min(o.host_memory, staging);
}

CpuBinding bind_rank(const TrainConfig& config, const Ranks& ranks) {
  const std::vector<uint32_t> allowed = allowed_cpus();
  const Turn turn = turn_among(hash_of(text_of(allowed)), ranks);
  const std::vector<GpuAddress> gpus = ranks.gather(expected_gpu(config, ranks.identity()));
  const Machine machine = turn.count > 1 ? read_machine() : Machine();
  if (turn.count == 1 || !machine.is_this_system) return CpuBinding({});
  if (allowed.size() < turn.count) {
    if (turn.index == 0) {
      log_warning("{} ranks share the {} CPUs of this host: they take turns", turn.count,
                  allowed.size());
    }
    return CpuBinding({});
  }
  PlacementOptions options{.ranks = turn.count, .allowed = allowed, .drives = {}, .gpus = {}};
  for (const fs::path& path : config.offload.nvme_paths) {
    const std::string drive = drive_of(path);
    // A file system may lie on what is near no core: a loop device, a network.
    if (std::ranges::count(machine.drives, drive, &Drive::name) == 0) continue;
    options.drives.push_back(drive);
  }
  for (const uint32_t rank : turn.ranks) options.gpus.emplace_back(gpus[rank].data());
  const RankPlacement placement = plan_ranks(machine, options);
  std::vector<uint32_t> cpus;
  for (const PlacedCores& cores : placement.ranks[turn.index].cores) {
    for (const auto* some : {&cores.cpus.compute, &cores.cpus.io, &cores.cpus.idle}) {
      cpus.insert(cpus.end(), some->begin(), some->end());
    }
  }
  std::ranges::sort(cpus);
  return CpuBinding(cpus);
}

TrainConfig with_own_devices(TrainConfig config, const Ranks& ranks) {
  OffloadConfig& offload = config.offload;
  std::string chosen;
  for (const fs::path& path : offload.nvme_paths) {
    if (is_device(path)) chosen += path.string() + "\n";
  }
  const Turn turn = turn_among(hash_of(chosen), ranks);
  const auto devices = static_cast<uint32_t>(std::ranges::count(chosen, '\n'));
  if (turn.count == 1 || devices == 0) return config;
  if (devices < turn.count) {
    fail(ErrorCode::invalid_config,
         "offload.nvme_paths: {} block device{} for {} ranks of this host, which cannot share one; "
         "name as many devices as ranks, or directories on file systems",
         devices, devices == 1 ? "" : "s", turn.count);
  }
  OffloadConfig own = offload;
  own.nvme_paths.clear();
  if (own.nvme_shares) own.nvme_shares->clear();
  uint32_t seen = 0;
  for (size_t i = 0; i < offload.nvme_paths.size(); ++i) {
    if (is_device(offload.nvme_paths[i]) && seen++ % turn.count != turn.index) continue;
    own.nvme_paths.push_back(offload.nvme_paths[i]);
    if (own.nvme_shares) own.nvme_shares->push_back((*offload.nvme_shares)[i]);
  }
  offload = std::move(own);
  return config;
}

void require_shared_output(const fs::path& output_dir, const Ranks& ranks) {
  std::error_code error;
  fs::create_directories(output_dir, error);
  if (error) {
    fail(ErrorCode::io, "output_dir {}: cannot be created: {}; choose another output_dir",
         output_dir.string(), error.message());
  }
  if (ranks.size() == 1) return;
  const std::string name = ranks.broadcast(fmt::format("{}{}", kMark, ::getpid()));
  if (ranks.first()) {
    for (const auto& entry : fs::directory_iterator(output_dir)) {
      // One that an earlier run has left when it was killed.
      if (entry.path().filename().string().starts_with(kMark)) fs::remove(entry.path());
    }
    write_text_file(output_dir / name, "");
  }
  ranks.world().barrier();
  const bool seen = fs::exists(output_dir / name);
  const std::vector<char> all = ranks.gather(static_cast<char>(seen));
  if (ranks.first()) fs::remove(output_dir / name);
  if (std::ranges::count(all, 0) == 0) return;
  const auto blind = static_cast<size_t>(std::ranges::find(all, 0) - all.begin());
  fail(ErrorCode::io,
       "output_dir {}: rank {} does not see what rank 0 writes there: where ranks are on several "
       "hosts, it must be on a file system that they share",
       output_dir.string(), blind);
}

void require_alike(const std::vector<std::pair<std::string, uint64_t>>& things,
                   const Ranks& ranks) {
  std::vector<uint64_t> own;
  for (const auto& [name, value] : things) own.push_back(value);
  const std::vector<uint64_t> all = ranks.gather(std::span<const uint64_t>(own));
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t rank = i / own.size(), thing = i % own.size();
    if (all[i] == all[thing]) continue;
    fail(ErrorCode::invalid_config,
         "rank {} has another {} than rank 0; give all ranks the same models, data and checkpoints",
         rank, things[thing].first);
  }
}

}  // namespace overspill
