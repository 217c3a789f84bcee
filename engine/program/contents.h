// What the verifier knows of every byte of every slot and of the pages on NVMe while it replays a
// Program: which page lies there, in which version, and who wrote and read it. Refuses what would
// race. What is there stays when one Program has ended and the next begins. Internal to
// engine/program.
#pragma once

#include <fmt/format.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// Throws Error(internal) naming the op.
template <class... Args>
[[noreturn]] void refuse_op(const Program& program, OpId id, fmt::format_string<Args...> text,
                            Args&&... args) {
  const Op& op = program.ops[id.value];
  fail(ErrorCode::internal, "program verification: op {} ({} L{}.{}): {}", id.value,
       op_name(op.kind), op.layer, op.index, fmt::format(text, std::forward<Args>(args)...));
}

class Contents {
 public:
  /// A part of a slot that should hold a page, or a part of it.
  struct Range {
    SlotId slot;
    PageId page;
    uint64_t begin, end;
    uint64_t origin;  ///< where in the slot the page begins
  };

  struct Value {
    PageId page;
    uint32_t version = 0;
    bool operator==(const Value&) const = default;
  };

  explicit Contents(const Layout& layout);

  /// The Program's ops follow. It outlives end().
  void begin(const Program& program);
  /// They have all finished.
  void end();

  // Before a Program, or between two.

  /// The page lies at its home in version 0.
  void store(PageId id);
  /// The range holds the page.
  void hold(const Range& range, uint32_t version);
  /// Nobody counts on what the slot holds.
  void forget(SlotId slot) { slots_[slot.value].clear(); }

  /// The version of the page that the whole range holds, its writer having finished; refuses
  /// anything else.
  uint32_t find(OpId op, const Range& range) const;
  void read(OpId op, const Range& range);
  /// Without a page: bytes of no meaning.
  void write(OpId op, const Range& range, uint32_t version);

  /// The same at a page's home on NVMe.
  Value read_nvme(OpId op, PageId home);
  void write_nvme(OpId op, PageId home, Value value);

  /// What a byte belongs to.
  std::optional<Value> at(SlotId slot, uint64_t offset) const;
  /// The version that the whole range holds, or none.
  std::optional<uint32_t> version_in(const Range& range) const;
  /// What is at a page's home on NVMe, or none.
  std::optional<Value> on_nvme(PageId home) const;
  /// The page's version at its home, or none.
  std::optional<uint32_t> version_at_home(PageId id) const;

 private:
  struct Piece {
    uint64_t end;
    PageId page;
    OpId writer;
    std::array<OpId, kLanes> readers;  ///< the newest of each lane: lanes are FIFO
    uint32_t version = 0;
    uint64_t origin = 0;  ///< where in the slot the page begins
  };
  using Pieces = std::map<uint64_t, Piece>;  ///< by first byte, disjoint

  static void split(Pieces& pieces, uint64_t at);
  /// Whole pieces over the range, also where nothing is known of it.
  static void cover(Pieces& pieces, uint64_t begin, uint64_t end);
  Pieces::const_iterator first_over(SlotId slot, uint64_t at) const;
  std::string name_of(PageId id) const;
  void require_order(OpId before, OpId after, SlotId slot) const;
  void require_free(const Piece& piece, OpId op, SlotId slot) const;

  const Layout& layout_;
  const Program* program_ = nullptr;
  std::optional<HappensBefore> order_;
  std::vector<Pieces> slots_;
  std::vector<Piece> nvme_;
};

}  // namespace overspill
