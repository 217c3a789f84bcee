// The memory behind a layout's slots, and whole pages at their homes between steps (loading,
// checkpoints). While a Program runs, only its lanes touch slots; page access is for one thread.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "engine/plan/layout.h"
#include "nvme/integrity.h"
#include "nvme/volume.h"
#include "offload/arena.h"
#include "offload/device.h"

namespace overspill {

/// The arrays of host slots that updates work on. With several parallel groups, each array is
/// spread over the groups' nodes as an update's work is; with one, nothing needs to be said.
std::vector<ArenaPart> host_parts(const Layout& layout);

class PageStore {
 public:
  struct Options {
    std::vector<std::filesystem::path> nvme_paths;
    IoOptions io;
    /// Stripes of each path in turn; unset: measured when much state is on NVMe, else one each.
    std::optional<std::vector<uint32_t>> nvme_shares{};
    bool allow_raw_devices = false;
    /// The device; unset: the host, unified or not as the layout says.
    std::optional<uint32_t> gpu{};
  };
  /// Allocates both arenas and the swap files: everything a run needs. On a GPU the host's arena is
  /// pinned.
  PageStore(const Layout& layout, const Options& options);

  const Layout& layout() const { return layout_; }
  Device& device() const { return *device_; }
  const IoOptions& io() const { return options_.io; }
  /// Null when no page lives on NVMe.
  const Volume* volume() const { return volume_ ? &*volume_ : nullptr; }
  /// A new way to the volume, for the thread that calls.
  std::unique_ptr<Channel> open_channel();
  std::byte* address(SlotId slot, uint64_t offset = 0) const;
  /// Null arrays where the optimizer has none.
  FactoredMoments factored_moments() const;

  /// Host-visible memory for a page: its home where the host can address it, else a working slot
  /// whose content is the caller's until the next buffer() for a page of the same kind.
  std::span<std::byte> buffer(PageId id);
  /// Fills buffer() with the first `bytes` of the page (a multiple of 4096).
  std::span<std::byte> load(PageId id, uint64_t bytes);
  std::span<std::byte> load(PageId id) { return load(id, layout_.page(id).bytes); }
  /// Stores the first `bytes` of buffer() to the page's home.
  void store(PageId id, uint64_t bytes);
  void store(PageId id) { store(id, layout_.page(id).bytes); }

 private:
  bool host_addresses(const Page& page) const;
  Channel& channel();

  const Layout& layout_;
  Options options_;
  std::unique_ptr<Device> device_;
  Arena host_;
  HostRegistration pinned_;  ///< released before both
  std::optional<Volume> volume_;
  std::optional<Integrity> integrity_;
  std::unique_ptr<Channel> channel_;
};

}  // namespace overspill
