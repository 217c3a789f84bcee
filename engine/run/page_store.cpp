// Slot addresses and synchronous page access.
#include "engine/run/page_store.h"

#include "engine/base/error.h"
#include "engine/program/dump.h"

namespace overspill {

PageStore::PageStore(const Layout& layout, const Options& options)
    : layout_(layout),
      options_(options),
      device_(make_host_device(layout.device_bytes, layout.options.unified)),
      host_(layout.host_bytes, "host") {
  if (layout.nvme_bytes == 0) return;
  volume_.emplace(VolumeOptions{.directories = options.nvme_paths,
                                .capacity_bytes = layout.nvme_bytes,
                                .stripe_bytes = options.io.block_size});
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
  if (!channel_) channel_ = std::make_unique<Channel>(*volume_, options_.io);
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
