// The checks before a device is overwritten. Reads signatures through libblkid.
#include "nvme/raw_device.h"

#include <blkid/blkid.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "nvme/swap_file.h"

namespace overspill::raw_device {
namespace {

struct ProbeDeleter {
  void operator()(blkid_probe probe) const { blkid_free_probe(probe); }
};
using Probe = std::unique_ptr<blkid_struct_probe, ProbeDeleter>;

std::string value_of(blkid_probe probe, const char* name) {
  const char* text = nullptr;
  return blkid_probe_lookup_value(probe, name, &text, nullptr) == 0 ? text : "";
}

/// What is on the device, such as "ext4" or "a gpt partition table"; empty when nothing is known.
std::string signature(const Fd& device) {
  const Probe probe(blkid_new_probe());
  const auto refuse = [&] {
    fail(ErrorCode::io, "look for signatures on {}: libblkid refused; check the drive (dmesg)",
         device.path().string());
  };
  if (!probe || blkid_probe_set_device(probe.get(), device.get(), 0, 0) != 0) refuse();
  blkid_probe_enable_superblocks(probe.get(), 1);
  blkid_probe_set_superblocks_flags(probe.get(), BLKID_SUBLKS_TYPE);
  blkid_probe_enable_partitions(probe.get(), 1);
  const int outcome = blkid_do_safeprobe(probe.get());
  if (outcome == 1) return "";
  if (outcome == -2) return "more than one file system";
  if (outcome != 0) refuse();
  if (const std::string type = value_of(probe.get(), "TYPE"); !type.empty()) return type;
  const std::string table = value_of(probe.get(), "PTTYPE");
  return table.empty() ? "an unknown signature" : fmt::format("a {} partition table", table);
}

void check_sectors(const Fd& device) {
  int bytes = 0;
  if (ioctl(device.get(), BLKSSZGET, &bytes) != 0) {
    fail(ErrorCode::io, "read the sector size of {}: {}; check the drive (dmesg)",
         device.path().string(), errno_text(errno));
  }
  if (bytes <= 0 || swap_file::kHeaderBytes % static_cast<uint64_t>(bytes) != 0) {
    fail(ErrorCode::invalid_config,
         "{} has sectors of {} bytes; accepted: 4096 or less; name another drive in "
         "offload.nvme_paths",
         device.path().string(), bytes);
  }
}

void check_size(const Fd& device, uint64_t needed) {
  uint64_t bytes = 0;
  if (ioctl(device.get(), BLKGETSIZE64, &bytes) != 0) {
    fail(ErrorCode::io, "read the size of {}: {}; check the drive (dmesg)", device.path().string(),
         errno_text(errno));
  }
  if (bytes >= needed) return;
  fail(ErrorCode::does_not_fit,
       "{}: needs {} ({} bytes), the device has {} ({} bytes); set offload.nvme_paths to a larger "
       "drive or to several drives",
       device.path().string(), format_bytes(needed), needed, format_bytes(bytes), bytes);
}

}  // namespace

bool is_block_device(const std::filesystem::path& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISBLK(status.st_mode);
}

Fd open_exclusively(const std::filesystem::path& path, uint64_t bytes) {
  // O_EXCL fails while the device, or a partition of it, is mounted or claimed (RAID, LVM, swap).
  // O_DIRECT comes after libblkid, whose reads are not aligned.
  Fd device(::open(path.c_str(), O_RDWR | O_EXCL | O_CLOEXEC), path);
  if (!device.valid() && errno == EBUSY) {
    fail(ErrorCode::invalid_config,
         "{} is mounted, or in use by a RAID, a volume group or another run; name a free device in "
         "offload.nvme_paths",
         path.string());
  }
  if (!device.valid()) {
    fail(ErrorCode::io, "open {}: {}; change its permissions or offload.nvme_paths", path.string(),
         errno_text(errno));
  }
  check_sectors(device);
  if (const std::string found = signature(device); !found.empty()) {
    fail(ErrorCode::invalid_config,
         "{} holds {}, which would be overwritten; wipe it (wipefs -a) if nobody needs it, or name "
         "another device in offload.nvme_paths",
         path.string(), found);
  }
  check_size(device, bytes);
  if (fcntl(device.get(), F_SETFL, O_DIRECT) != 0) {
    fail(ErrorCode::io, "switch {} to O_DIRECT: {}; name a directory on it instead", path.string(),
         errno_text(errno));
  }
  return device;
}

}  // namespace overspill::raw_device
