// Replays a Program symbolically: for every byte of every slot, which page it holds and who wrote
// and read it. Shares nothing with the planner's scoreboard.
#include "engine/program/verify.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "engine/base/error.h"
#include "engine/program/dump.h"

namespace overspill {
namespace {

struct Piece {
  uint64_t end;
  PageId page;
  OpId writer;
  std::vector<OpId> readers;
  uint32_t version = 0;  ///< of the page, when it came here
};

bool moves_pages(OpKind kind) {
  return kind == OpKind::read || kind == OpKind::write || kind == OpKind::copy_to_device ||
         kind == OpKind::copy_to_host;
}

class Verifier {
 public:
  Verifier(const Program& program, const Layout& layout)
      : program_(program),
        layout_(layout),
        order_(program),
        slots_(layout.slots.size()),
        nvme_(layout.pages.size()),
        newest_(layout.pages.size()),
        updated_(layout.pages.size()),
        written_(layout.pages.size()) {}

  void run() {
    check_layout();
    fill_homes();
    for (uint32_t i = 0; i < program_.ops.size(); ++i) check_op(OpId{i});
    check_results();
  }

 private:
  template <class... Args>
  void require(bool condition, OpId op, fmt::format_string<Args...> text, Args&&... args) const {
    if (condition) return;
    const Op& o = program_.ops[op.value];
    fail(ErrorCode::internal, "program verification: op {} ({} L{}.{}): {}", op.value,
         op_name(o.kind), o.layer, o.index, fmt::format(text, std::forward<Args>(args)...));
  }

  void check_layout() const {
    const PlanOptions& o = layout_.options;
    if (layout_.device_bytes > o.device_memory || layout_.host_bytes > o.host_memory ||
        layout_.nvme_bytes > o.nvme_capacity) {
      fail(ErrorCode::internal, "program verification: the layout exceeds a budget");
    }
    std::vector<Slot> sorted = layout_.slots;
    std::sort(sorted.begin(), sorted.end(), [](const Slot& a, const Slot& b) {
      return a.memory != b.memory ? a.memory < b.memory : a.offset < b.offset;
    });
    for (size_t i = 0; i < sorted.size(); ++i) {
      const uint64_t arena =
          sorted[i].memory == Tier::device ? layout_.device_bytes : layout_.host_bytes;
      const bool overlaps = i > 0 && sorted[i - 1].memory == sorted[i].memory &&
                            sorted[i - 1].offset + sorted[i - 1].bytes > sorted[i].offset;
      if (overlaps || sorted[i].offset + sorted[i].bytes > arena) {
        fail(ErrorCode::internal, "program verification: slots overlap or leave their arena");
      }
    }
  }

  void fill_homes() {
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      const Page& page = layout_.pages[i];
      const bool stored = page.kind == PageKind::weight || page.kind == PageKind::optimizer ||
                          (page.kind == PageKind::gradient && program_.kind.pending_update);
      if (!stored || page.bytes == 0) continue;
      if (page.home == Tier::nvme) {
        nvme_[i] = {1, PageId{i}, OpId{}, {}, 0};
      } else if (page.home_slot != SlotId{}) {
        slots_[page.home_slot.value][page.home_offset] = {
            page.home_offset + page.bytes, PageId{i}, OpId{}, {}, 0};
      }
    }
  }

  void check_op(OpId id) {
    const Op& op = program_.ops[id.value];
    for (const OpId dep : program_.deps_of(op)) {
      require(dep.value < id.value, id, "depends on a later op {}", dep.value);
    }
    count_updates(op);
    for (const Access& access : program_.accesses_of(op)) {
      check_reach(id, op, access);
      if (!moves_pages(op.kind) && access.mode != AccessMode::read) ++newest_[access.page.value];
      uint64_t offset = access.offset;
      const uint64_t end = access.offset + access.bytes;
      for (uint32_t i = 0; i < access.page_count; ++i) {
        const PageId page{access.page.value + i};
        const uint64_t bytes = access.page_count == 1 ? access.bytes : layout_.page(page).bytes;
        check_range(id, access, page, offset, offset + bytes);
        offset += bytes;
      }
      require(offset == end, id, "an access covers {} bytes, its pages {}", access.bytes,
              offset - access.offset);
      if (op.kind == OpKind::read || op.kind == OpKind::write) check_nvme(id, op, access);
    }
  }

  void check_reach(OpId id, const Op& op, const Access& access) const {
    const Slot& slot = layout_.slot(access.slot);
    require(access.offset + access.bytes <= slot.bytes, id, "leaves slot {}", access.slot.value);
    if (layout_.options.unified) return;
    const bool device = slot.memory == Tier::device;
    const bool written = access.mode != AccessMode::read;
    switch (op.lane) {
      case Lane::nvme_read:
      case Lane::nvme_write:
      case Lane::optimizer:
        return require(!device, id, "touches device slot {}", access.slot.value);
      case Lane::compute: return require(device, id, "touches host slot {}", access.slot.value);
      case Lane::h2d: return require(device == written, id, "copies the wrong way");
      case Lane::d2h: return require(device != written, id, "copies the wrong way");
      case Lane::collective: return;
    }
  }

  void check_range(OpId id, const Access& access, PageId page, uint64_t begin, uint64_t end) {
    std::map<uint64_t, Piece>& pieces = slots_[access.slot.value];
    split(pieces, begin);
    split(pieces, end);
    const bool writes = access.mode != AccessMode::read;
    uint64_t covered = begin;
    for (auto it = pieces.lower_bound(begin); it != pieces.end() && it->first < end; ++it) {
      Piece& piece = it->second;
      if (access.mode != AccessMode::write) {
        require(it->first == covered && piece.page == page, id,
                "expects {} in slot {} at {}, finds {}", page_name(layout_.page(page)),
                access.slot.value, it->first,
                piece.page == PageId{} ? "nothing" : page_name(layout_.page(piece.page)));
        // An update in place is itself one version ahead of what it finds.
        const uint32_t made = makes_version(id, access) ? 1 : 0;
        require(piece.version + made == newest_[page.value], id,
                "finds an old version of {} in slot {}", page_name(layout_.page(page)),
                access.slot.value);
      }
      covered = piece.end;
      ordered(piece.writer, id, access.slot);
      if (writes) {
        for (const OpId reader : piece.readers) ordered(reader, id, access.slot);
      } else {
        piece.readers.push_back(id);
      }
    }
    if (access.mode != AccessMode::write) {
      require(covered == end, id, "expects {} in slot {}, which holds {} of {} bytes of it",
              page_name(layout_.page(page)), access.slot.value, covered - begin, end - begin);
    }
    if (!writes) return;
    pieces.erase(pieces.lower_bound(begin), pieces.lower_bound(end));
    pieces[begin] = {end, page, id, {}, newest_[page.value]};
  }

  void check_nvme(OpId id, const Op& op, const Access& access) {
    Piece& home = nvme_[access.page.value];
    const std::string name = page_name(layout_.page(access.page));
    require(layout_.page(access.page).home == Tier::nvme, id, "{} has no home on NVMe", name);
    const SlotId none;
    ordered(home.writer, id, none);
    if (op.kind == OpKind::read) {
      require(home.page == access.page, id, "reads {} before it was written", name);
      require(home.version == newest_[access.page.value], id, "reads an old version of {}", name);
      home.readers.push_back(id);
      return;
    }
    require(access.bytes == layout_.page(access.page).bytes, id, "writes only a part of {}", name);
    for (const OpId reader : home.readers) ordered(reader, id, none);
    home = {1, access.page, id, {}, newest_[access.page.value]};
    ++written_[access.page.value];
  }

  /// Whether an access of a kernel leaves a new version of its page.
  bool makes_version(OpId id, const Access& access) const {
    return access.mode != AccessMode::read && !moves_pages(program_.ops[id.value].kind);
  }

  void count_updates(const Op& op) {
    if (op.kind != OpKind::update) return;
    for (const Access& access : program_.accesses_of(op)) {
      if (access.mode != AccessMode::read) ++updated_[access.page.value];
    }
  }

  /// Whether a chunk holds a part of a trainable tensor; from the model, not from the chunk table.
  bool trains(uint32_t layer, uint32_t chunk) const {
    uint64_t begin = 0;
    for (uint32_t c = 0; c < chunk; ++c) begin += weights_of(layer, c);
    const uint64_t end = begin + weights_of(layer, chunk);
    return std::ranges::any_of(layout_.model.layers[layer].tensors, [&](const LayerTensor& t) {
      return t.trainable && t.offset < end && begin < t.offset + t.elements;
    });
  }
  uint64_t weights_of(uint32_t layer, uint32_t chunk) const {
    return layout_.page(layout_.weight(layer, chunk)).bytes / layout_.options.weight_bytes();
  }

  /// The version at home, or none.
  std::optional<uint32_t> version_at_home(uint32_t id) const {
    const Page& page = layout_.pages[id];
    if (page.home == Tier::nvme) {
      return nvme_[id].page == PageId{id} ? std::optional(nvme_[id].version) : std::nullopt;
    }
    const auto& pieces = slots_[page.home_slot.value];
    const auto found = pieces.find(page.home_offset);
    if (found == pieces.end() || found->second.page != PageId{id}) return std::nullopt;
    return found->second.version;
  }

  void check_results() const {
    const StepKind& kind = program_.kind;
    const bool in_backward = layout_.options.update == UpdateTiming::in_backward;
    const bool backward = kind.forward && kind.backward;
    const bool updates = kind.pending_update || (in_backward && backward);
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      const Page& page = layout_.pages[i];
      const bool gradient = page.kind == PageKind::gradient;
      if (page.kind != PageKind::weight && page.kind != PageKind::optimizer && !gradient) continue;
      const bool changes = trains(page.layer, page.index);
      const auto hold = [&](bool condition, const char* what) {
        if (condition) return;
        fail(ErrorCode::internal, "program verification: {}: {}", page_name(page), what);
      };
      hold(changes || (newest_[i] == 0 && written_[i] == 0), "is frozen, and written");
      hold(changes || page.kind == PageKind::weight || page.bytes == 0, "is frozen, with state");
      if (gradient) {
        hold(newest_[i] == (changes && backward ? 1u : 0u), "is not left by the backward once");
      } else if (page.bytes > 0) {
        hold(updated_[i] == (changes && updates ? 1u : 0u), "is not updated once");
      }
      const bool kept = page.bytes > 0 && (!gradient || (backward && !in_backward));
      hold(!kept || version_at_home(i) == newest_[i], "does not end in its newest version at home");
    }
  }

  void ordered(OpId before, OpId after, SlotId slot) const {
    if (!before.valid() || before == after) return;
    require(order_.ordered(before, after), after, "races with op {} on slot {}", before.value,
            static_cast<int32_t>(slot.value));
  }

  static void split(std::map<uint64_t, Piece>& pieces, uint64_t at) {
    auto next = pieces.upper_bound(at);
    if (next == pieces.begin()) return;
    auto piece = std::prev(next);
    if (piece->first == at || piece->second.end <= at) return;
    Piece tail = piece->second;
    piece->second.end = at;
    pieces.emplace(at, std::move(tail));
  }

  const Program& program_;
  const Layout& layout_;
  HappensBefore order_;
  std::vector<std::map<uint64_t, Piece>> slots_;
  std::vector<Piece> nvme_;
  std::vector<uint32_t> newest_;             ///< version of each page
  std::vector<uint32_t> updated_, written_;  ///< times each page was, by updates and to NVMe
};

}  // namespace

void verify_program(const Program& program, const Layout& layout) {
  Verifier(program, layout).run();
}

}  // namespace overspill
