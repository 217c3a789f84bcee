// Slot addresses and synchronous page access.
#include "engine/run/page_store.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"
#include "engine/program/dump.h"
#include "nvme/drive_probe.h"

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

/// Host slots by turns on the parallel groups' nodes: homes by their layer, so that what an update
/// needs together is together; working slots by their number among those of their role.
std::vector<uint32_t> slot_groups(const Layout& layout) {
  std::vector<uint32_t> groups(layout.slots.size(), kAllGroups);
  const uint32_t count = parallel_group_count();
  if (count == 1) return groups;
  for (const Page& page : layout.pages) {
    if (page.home == Tier::host && page.home_slot != SlotId{}) {
      groups[page.home_slot.value] = page.layer % count;
    }
  }
  for (const auto* slots : {&layout.records, &layout.stages, &layout.activation_stages}) {
    for (uint32_t i = 0; i < slots->size(); ++i) groups[(*slots)[i].value] = i % count;
  }
  return groups;
}

/// The placed slots as parts of the host arena.
std::vector<ArenaPart> host_parts(const Layout& layout, const std::vector<uint32_t>& groups) {
  std::vector<ArenaPart> parts;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Slot& slot = layout.slots[i];
    if (groups[i] != kAllGroups) parts.push_back({slot.offset, slot.bytes, groups[i]});
  }
  return parts;
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

PageStore::PageStore(const Layout& layout, const Options& options)
    : layout_(layout),
      options_(options),
      groups_(slot_groups(layout)),
      device_(make_host_device(layout.device_bytes, layout.options.unified)),
      host_(layout.host_bytes, "host", host_parts(layout, groups_)) {
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
