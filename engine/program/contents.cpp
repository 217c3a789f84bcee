// Disjoint pieces of slots by their first byte.
#include "engine/program/contents.h"

#include <algorithm>

#include "engine/program/dump.h"

namespace overspill {

Contents::Contents(const Layout& layout)
    : layout_(layout), slots_(layout.slots.size()), nvme_(layout.pages.size()) {}

void Contents::begin(const Program& program) {
  program_ = &program;
  order_.emplace(program);
}

void Contents::end() {
  const auto settle = [](Piece& piece) {
    piece.writer = OpId{};
    piece.readers = {};
  };
  for (const Access& access : program_->accesses) {
    Pieces& pieces = slots_[access.slot.value];
    const auto end = pieces.lower_bound(access.offset + access.bytes);
    for (auto it = pieces.lower_bound(access.offset); it != end; ++it) settle(it->second);
    settle(nvme_[access.page.value]);
  }
  program_ = nullptr;
  order_.reset();
}

void Contents::store(PageId id) {
  const Page& page = layout_.page(id);
  if (page.home == Tier::nvme) {
    nvme_[id.value] = {1, id, OpId{}, {}, 0};
  } else if (page.home_slot != SlotId{}) {
    const uint64_t begin = page.home_offset;
    hold({page.home_slot, id, begin, begin + page.bytes, begin}, 0);
  }
}

void Contents::hold(const Range& r, uint32_t version) {
  Pieces& pieces = slots_[r.slot.value];
  split(pieces, r.begin);
  split(pieces, r.end);
  pieces.erase(pieces.lower_bound(r.begin), pieces.lower_bound(r.end));
  pieces[r.begin] = {r.end, r.page, OpId{}, {}, version, r.origin};
}

Contents::Pieces::const_iterator Contents::first_over(SlotId slot, uint64_t at) const {
  const Pieces& pieces = slots_[slot.value];
  const auto next = pieces.upper_bound(at);
  if (next == pieces.begin()) return next;
  return std::prev(next)->second.end > at ? std::prev(next) : next;
}

std::string Contents::name_of(PageId id) const {
  return id == PageId{} ? "nothing of use" : page_name(layout_.page(id));
}

uint32_t Contents::find(OpId op, const Range& r) const {
  const Pieces& pieces = slots_[r.slot.value];
  uint64_t covered = r.begin;
  std::optional<uint32_t> version;
  for (auto it = first_over(r.slot, r.begin); it != pieces.end() && it->first < r.end; ++it) {
    const Piece& piece = it->second;
    if (it->first > covered || piece.page != r.page || piece.origin != r.origin) {
      refuse_op(*program_, op, "expects {} in slot {} from {}, finds {} from {}", name_of(r.page),
                r.slot.value, r.origin, name_of(piece.page), piece.origin);
    }
    if (version.value_or(piece.version) != piece.version) {
      refuse_op(*program_, op, "finds two versions of {}", name_of(r.page));
    }
    version = piece.version;
    covered = std::min(piece.end, r.end);
    require_order(piece.writer, op, r.slot);
  }
  if (covered == r.end && version) return *version;
  refuse_op(*program_, op, "expects {} in slot {}, which holds {} of {} bytes of it",
            name_of(r.page), r.slot.value, covered - r.begin, r.end - r.begin);
}

void Contents::read(OpId op, const Range& r) {
  Pieces& pieces = slots_[r.slot.value];
  cover(pieces, r.begin, r.end);
  const auto lane = static_cast<size_t>(program_->ops[op.value].lane);
  for (auto it = pieces.lower_bound(r.begin); it != pieces.end() && it->first < r.end; ++it) {
    require_order(it->second.writer, op, r.slot);
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

Contents::Value Contents::read_nvme(OpId op, PageId id) {
  Piece& home = nvme_[id.value];
  if (home.page == PageId{}) {
    refuse_op(*program_, op, "reads {} before it was written", name_of(id));
  }
  require_order(home.writer, op, SlotId{});
  home.readers[static_cast<size_t>(program_->ops[op.value].lane)] = op;
  return {home.page, home.version};
}

void Contents::write_nvme(OpId op, PageId home, Value value) {
  require_free(nvme_[home.value], op, SlotId{});
  nvme_[home.value] = {1, value.page, op, {}, value.version};
}

std::optional<Contents::Value> Contents::at(SlotId slot, uint64_t offset) const {
  const auto found = first_over(slot, offset);
  if (found == slots_[slot.value].end() || found->first > offset) return std::nullopt;
  return Value{found->second.page, found->second.version};
}

std::optional<uint32_t> Contents::version_in(const Range& r) const {
  const Pieces& pieces = slots_[r.slot.value];
  uint64_t covered = r.begin;
  std::optional<uint32_t> version;
  for (auto it = first_over(r.slot, r.begin); it != pieces.end() && it->first < r.end; ++it) {
    const Piece& piece = it->second;
    const bool fits = it->first <= covered && piece.page == r.page && piece.origin == r.origin;
    if (!fits || version.value_or(piece.version) != piece.version) return std::nullopt;
    version = piece.version;
    covered = piece.end;
  }
  return covered >= r.end ? version : std::nullopt;
}

std::optional<Contents::Value> Contents::on_nvme(PageId home) const {
  const Piece& piece = nvme_[home.value];
  if (piece.page == PageId{}) return std::nullopt;
  return Value{piece.page, piece.version};
}

std::optional<uint32_t> Contents::version_at_home(PageId id) const {
  const Page& page = layout_.page(id);
  if (page.home == Tier::nvme) {
    const std::optional<Value> home = on_nvme(id);
    return home && home->page == id ? std::optional(home->version) : std::nullopt;
  }
  const uint64_t begin = page.home_offset;
  return version_in({page.home_slot, id, begin, begin + page.bytes, begin});
}

void Contents::require_free(const Piece& piece, OpId op, SlotId slot) const {
  require_order(piece.writer, op, slot);
  for (const OpId reader : piece.readers) require_order(reader, op, slot);
}

void Contents::require_order(OpId before, OpId after, SlotId slot) const {
  if (!before.valid() || before == after || order_->ordered(before, after)) return;
  const std::string where =
      slot == SlotId{} ? "a page on NVMe" : fmt::format("slot {}", slot.value);
  refuse_op(*program_, after, "races with op {} on {}", before.value, where);
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

void Contents::cover(Pieces& pieces, uint64_t begin, uint64_t end) {
  split(pieces, begin);
  split(pieces, end);
  uint64_t at = begin;
  for (auto it = pieces.lower_bound(begin); at < end; ++it) {
    const uint64_t known = it == pieces.end() ? end : std::min(end, it->first);
    if (known > at) it = pieces.emplace_hint(it, at, Piece{known, PageId{}, OpId{}, {}});
    at = it->second.end;
  }
}

}  // namespace overspill
