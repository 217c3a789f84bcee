// Slot addresses and synchronous page access.
#include "engine/run/page_store.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"
#include "engine/program/dump.h"
#include "nvme/drive_probe.h"
#include "offload/cuda_device.h"

namespace overspill {
namespace {

/// An optimizer page's remainder is written and read alone while the moments are zero.
uint64_t prefix_bytes(const Layout& layout, const Page& page) {
  if (page.kind != PageKind::optimizer) return 0;
  return layout.state(layout.chunk(page.layer, page.index)).remainder_bytes();
}

std::vector<const Page*> nvme_pages(const Layout& layout) {
  std::vector<const Page*> pages;
  for (const Page& page : layout.pages) {
    if (page.home == Tier::nvme && page.bytes > 0) pages.push_back(&page);
  }
  std::ranges::sort(pages, {}, &Page::home_offset);
  return pages;
}

/// Pages in the volume as regions; `owners` gets each region's page.
std::vector<Integrity::Region> page_regions(const Layout& layout, std::vector<PageId>& owners) {
  std::vector<Integrity::Region> regions;
  for (const Page* page : nvme_pages(layout)) {
    const PageId id{static_cast<uint32_t>(page - layout.pages.data())};
    const uint64_t prefix = prefix_bytes(layout, *page);
    if (prefix > 0) {
      regions.push_back({page->home_offset, prefix});
      owners.push_back(id);
    }
    if (page->bytes == prefix) continue;  // no moments
    regions.push_back({page->home_offset + prefix, page->bytes - prefix});
    owners.push_back(id);
  }
  return regions;
}

/// The arrays of a chunk's page, which begins at an offset of the host arena.
void add_arrays(const Layout& layout, const Chunk& chunk, PageKind kind, uint64_t offset,
                uint64_t bytes, std::vector<ArenaPart>& parts) {
  std::vector<uint64_t> ends = {bytes};
  if (kind == PageKind::optimizer) {
    const StateLayout state = layout.state(chunk);
    ends = {state.first, state.second, state.first_scales, bytes};
  }
  uint64_t begin = 0;
  for (const uint64_t end : ends) {
    if (end > begin) parts.push_back({offset + begin, end - begin});
    begin = std::max(begin, end);
  }
}

std::unique_ptr<Device> make_device(const Layout& layout, const std::optional<uint32_t>& gpu) {
  CHECK(layout.options.streams == gpu.has_value());
  if (gpu) return make_cuda_device(layout.device_bytes, *gpu);
  return make_host_device(layout.device_bytes, layout.options.unified);
}

constexpr uint64_t kWorthMeasuring = 4 * kGiB;

/// Shares by measured speed; none where that is not worth its second or does not fit the budget.
std::vector<uint32_t> measured_shares(const Layout& layout, const VolumeOptions& volume,
                                      const IoOptions& io) {
  if (volume.directories.size() < 2 || layout.nvme_bytes < kWorthMeasuring) return {};
  const std::vector<double> rates = measure_drives(volume, io);
  const std::vector<uint32_t> shares = shares_of(rates);
  std::string text;
  for (size_t i = 0; i < rates.size(); ++i) {
    text += fmt::format("{}{} {} (share {})", i == 0 ? "" : ", ", volume.directories[i].string(),
                        format_rate(rates[i]), shares[i]);
  }
  log_info("drives: {}", text);
  const uint64_t bytes = volume_file_bytes(volume.capacity_bytes, volume.directories.size(),
                                           volume.stripe_bytes, shares);
  return bytes <= layout.options.nvme_capacity ? shares : std::vector<uint32_t>{};
}

}  // namespace

std::vector<ArenaPart> host_parts(const Layout& layout) {
  std::vector<ArenaPart> parts;
  if (parallel_group_count() == 1) return parts;
  for (const Page& page : layout.pages) {
    const bool of_chunk = page.kind == PageKind::weight || page.kind == PageKind::optimizer ||
                          page.kind == PageKind::gradient;
    if (!of_chunk || page.home != Tier::host || page.home_slot == SlotId{}) continue;
    add_arrays(layout, layout.chunk(page.layer, page.index), page.kind,
               layout.slot(page.home_slot).offset + page.home_offset, page.bytes, parts);
  }
  // Working slots take any chunk; nearly all are as large as the largest.
  const auto largest = std::ranges::max_element(layout.table.chunks, {}, [&](const Chunk& chunk) {
    return optimizer_page_bytes(layout.options, chunk);
  });
  for (const SlotId id : layout.records) {
    const Slot& slot = layout.slot(id);
    add_arrays(layout, *largest, PageKind::optimizer, slot.offset, slot.bytes, parts);
  }
  for (const SlotId id : layout.stages)
    parts.push_back({layout.slot(id).offset, layout.slot(id).bytes});
  return parts;
}

PageStore::PageStore(const Layout& layout, const Options& options)
    : layout_(layout),
      options_(options),
      device_(make_device(layout, options.gpu)),
      host_(layout.host_bytes, "host", host_parts(layout)) {
  if (options.gpu) pinned_ = device_->register_host({host_.memory(), host_.bytes()});
  if (layout.nvme_bytes == 0) return;
  // Lanes read into and write from these.
  options_.io.buffers = {{host_.memory(), host_.bytes()}};
  if (device_->unified())
    options_.io.buffers.push_back({device_->memory(), device_->memory_bytes()});
  std::erase_if(options_.io.buffers, [](std::span<std::byte> buffer) { return buffer.empty(); });
  VolumeOptions volume{.directories = options.nvme_paths,
                       .capacity_bytes = layout.nvme_bytes,
                       .stripe_bytes = options.io.block_size,
                       .allow_raw_devices = options.allow_raw_devices};
  volume.shares =
      options.nvme_shares ? *options.nvme_shares : measured_shares(layout, volume, io());
  volume_.emplace(volume);
  if (!options.io.verify) return;
  std::vector<PageId> owners;
  std::vector<Integrity::Region> regions = page_regions(layout, owners);
  integrity_.emplace(*volume_, options.io.block_size, std::move(regions),
                     [&layout, owners = std::move(owners)](size_t region) {
                       return page_description(layout.page(owners[region]));
                     });
}

std::unique_ptr<Channel> PageStore::open_channel() {
  return std::make_unique<Channel>(*volume_, options_.io, integrity_ ? &*integrity_ : nullptr);
}

std::byte* PageStore::address(SlotId id, uint64_t offset) const {
  const Slot& slot = layout_.slot(id);
  CHECK(offset <= slot.bytes);
  std::byte* arena = slot.memory == Tier::device ? device_->memory() : host_.memory();
  return arena + slot.offset + offset;
}

FactoredMoments PageStore::factored_moments() const {
  if (layout_.factored == SlotId{}) return {};
  const uint64_t sum_bytes = layout_.table.factored_elements * sizeof(double);
  return {.sums = reinterpret_cast<double*>(address(layout_.factored)),
          .averages = reinterpret_cast<float*>(address(layout_.factored, sum_bytes))};
}

bool PageStore::host_addresses(const Page& page) const {
  return page.home == Tier::host || (page.home == Tier::device && device_->unified());
}

std::span<std::byte> PageStore::buffer(PageId id) {
  const Page& page = layout_.page(id);
  if (host_addresses(page)) return {address(page.home_slot, page.home_offset), page.bytes};
  const auto& slots = page.kind == PageKind::optimizer ? layout_.records
                      : layout_.options.unified        ? layout_.weight_ring
                                                       : layout_.stages;
  CHECK(page.kind == PageKind::weight || page.kind == PageKind::optimizer);
  CHECK(!slots.empty() && layout_.slot(slots[0]).bytes >= page.bytes);
  return {address(slots[0]), page.bytes};
}

Channel& PageStore::channel() {
  if (!channel_) channel_ = open_channel();
  return *channel_;
}

std::span<std::byte> PageStore::load(PageId id, uint64_t bytes) {
  const Page& page = layout_.page(id);
  const std::span<std::byte> memory = buffer(id);
  if (page.home == Tier::nvme) {
    try {
      channel().read(std::array{Channel::Segment{page.home_offset, memory.data(), bytes}});
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", page_description(page), error.what()));
    }
  } else if (!host_addresses(page)) {
    device_->copy_to_host(memory.data(), address(page.home_slot, page.home_offset), bytes);
  }
  return memory;
}

void PageStore::store(PageId id, uint64_t bytes) {
  const Page& page = layout_.page(id);
  const std::span<std::byte> memory = buffer(id);
  if (page.home == Tier::nvme) {
    try {
      channel().write(std::array{Channel::Segment{page.home_offset, memory.data(), bytes}});
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", page_description(page), error.what()));
    }
  } else if (!host_addresses(page)) {
    device_->copy_to_device(address(page.home_slot, page.home_offset), memory.data(), bytes);
  }
}

}  // namespace overspill
