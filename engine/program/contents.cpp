// Disjoint pieces of slots by their first byte.
#include "engine/program/contents.h"

#include <algorithm>

#include "engine/program/dump.h"

namespace overspill {

Contents::Contents(const Program& program, const Layout& layout)
    : program_(program),
      layout_(layout),
      order_(program),
      slots_(layout.slots.size()),
      nvme_(layout.pages.size()) {}

void Contents::store(PageId id) {
  const Page& page = layout_.page(id);
  if (page.home == Tier::nvme) {
    nvme_[id.value] = {1, id, OpId{}, {}, 0};
  } else if (page.home_slot != SlotId{}) {
    const uint64_t begin = page.home_offset;
    slots_[page.home_slot.value][begin] = {begin + page.bytes, id, OpId{}, {}, 0, begin};
  }
}

uint32_t Contents::find(OpId op, const Range& r) const {
  const Pieces& pieces = slots_[r.slot.value];
  auto it = pieces.upper_bound(r.begin);
  if (it != pieces.begin() && std::prev(it)->second.end > r.begin) --it;
  uint64_t covered = r.begin;
  std::optional<uint32_t> version;
  for (; it != pieces.end() && it->first < r.end; ++it) {
    const Piece& piece = it->second;
    if (it->first > covered || piece.page != r.page || piece.origin != r.origin) {
      refuse_op(program_, op, "expects {} in slot {} from {}, finds {} from {}",
                page_name(layout_.page(r.page)), r.slot.value, r.origin,
                page_name(layout_.page(piece.page)), piece.origin);
    }
    if (version.value_or(piece.version) != piece.version) {
      refuse_op(program_, op, "finds two versions of {}", page_name(layout_.page(r.page)));
    }
    version = piece.version;
    covered = std::min(piece.end, r.end);
    require_order(piece.writer, op, r.slot);
  }
  if (covered == r.end && version) return *version;
  refuse_op(program_, op, "expects {} in slot {}, which holds {} of {} bytes of it",
            page_name(layout_.page(r.page)), r.slot.value, covered - r.begin, r.end - r.begin);
}

void Contents::read(OpId op, const Range& r) {
  Pieces& pieces = slots_[r.slot.value];
  split(pieces, r.begin);
  split(pieces, r.end);
  const auto lane = static_cast<size_t>(program_.ops[op.value].lane);
  for (auto it = pieces.lower_bound(r.begin); it != pieces.end() && it->first < r.end; ++it) {
    it->second.readers[lane] = op;
  }
}

void Contents::write(OpId op, const Range& r, uint32_t version) {
  Pieces& pieces = slots_[r.slot.value];
  split(pieces, r.begin);
  split(pieces, r.end);
  const auto begin = pieces.lower_bound(r.begin), end = pieces.lower_bound(r.end);
  for (auto it = begin; it != end; ++it) require_free(it->second, op, r.slot);
  pieces.erase(begin, end);
  pieces[r.begin] = {r.end, r.page, op, {}, version, r.origin};
}

uint32_t Contents::read_nvme(OpId op, PageId id) {
  Piece& home = nvme_[id.value];
  if (home.page != id) {
    refuse_op(program_, op, "reads {} before it was written", page_name(layout_.page(id)));
  }
  require_order(home.writer, op, SlotId{});
  home.readers[static_cast<size_t>(program_.ops[op.value].lane)] = op;
  return home.version;
}

void Contents::write_nvme(OpId op, PageId id, uint32_t version) {
  require_free(nvme_[id.value], op, SlotId{});
  nvme_[id.value] = {1, id, op, {}, version};
}

std::optional<uint32_t> Contents::version_at_home(PageId id) const {
  const Page& page = layout_.page(id);
  if (page.home == Tier::nvme) {
    const Piece& home = nvme_[id.value];
    return home.page == id ? std::optional(home.version) : std::nullopt;
  }
  const Pieces& pieces = slots_[page.home_slot.value];
  const auto found = pieces.find(page.home_offset);
  if (found == pieces.end() || found->second.page != id) return std::nullopt;
  return found->second.version;
}

void Contents::require_free(const Piece& piece, OpId op, SlotId slot) const {
  require_order(piece.writer, op, slot);
  for (const OpId reader : piece.readers) require_order(reader, op, slot);
}

void Contents::require_order(OpId before, OpId after, SlotId slot) const {
  if (!before.valid() || before == after || order_.ordered(before, after)) return;
  const std::string where =
      slot == SlotId{} ? "a page on NVMe" : fmt::format("slot {}", slot.value);
  refuse_op(program_, after, "races with op {} on {}", before.value, where);
}

void Contents::split(Pieces& pieces, uint64_t at) {
  const auto next = pieces.upper_bound(at);
  if (next == pieces.begin()) return;
  const auto piece = std::prev(next);
  if (piece->first == at || piece->second.end <= at) return;
  const Piece tail = piece->second;
  piece->second.end = at;
  pieces.emplace_hint(next, at, tail);
}

}  // namespace overspill
