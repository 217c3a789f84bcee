// Replays a Program symbolically: for every byte of every slot, which page it holds and who wrote
// and read it (contents.h). Shares nothing with the planner's scoreboard.
#include "engine/program/verify.h"

#include <algorithm>
#include <vector>

#include "engine/base/error.h"
#include "engine/program/contents.h"
#include "engine/program/dump.h"
#include "engine/program/op_order.h"
#include "engine/program/op_rules.h"

namespace overspill {
namespace {

class Verifier {
 public:
  Verifier(const Program& program, const Layout& layout)
      : program_(program),
        layout_(layout),
        contents_(layout),
        newest_(layout.pages.size()),
        updated_(layout.pages.size()),
        written_(layout.pages.size()),
        gradient_used_(layout.pages.size()),
        may_be_old_(layout.pages.size()),
        order_(program, layout) {}

  void run() {
    for (uint32_t l = 0; l < layout_.model.layers.size(); ++l)
      trains_.push_back(training_chunks(layout_, l));
    check_layout(layout_);
    fill_homes();
    contents_.begin(program_);
    for (uint32_t i = 0; i < program_.ops.size(); ++i) check_op(OpId{i});
    order_.check_complete();
    check_results();
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(OpId op, fmt::format_string<Args...> text, Args&&... args) const {
    refuse_op(program_, op, text, std::forward<Args>(args)...);
  }

  void fill_homes() {
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      const Page& page = layout_.pages[i];
      const bool state = page.kind == PageKind::weight || page.kind == PageKind::optimizer;
      may_be_old_[i] = state && twice(page.layer);
      const bool stored =
          state || (page.kind == PageKind::gradient && program_.kind.pending_update);
      if (stored && page.bytes > 0) contents_.store(PageId{i});
    }
  }

  /// Whether the step updates the layer in the forward and repeats that in the backward.
  bool twice(uint32_t layer) const {
    const StepKind& kind = program_.kind;
    return kind.pending_update && kind.forward && kind.backward && layout_.updates_twice(layer);
  }

  void check_op(OpId id) {
    const Op& op = program_.ops[id.value];
    check_dependencies(program_, id);
    check_lane(program_, id);
    order_.check(id, newest_[layout_.gradient_sum[op.layer].value]);
    const std::span<const Access> accesses = program_.accesses_of(op);
    const bool repeats =
        op.kind == OpKind::update && !accesses.empty() && updated_[accesses[0].page.value] > 0;
    uint32_t moved = 0;  // the version that the last access found
    for (const Access& access : accesses) {
      check_reach(program_, layout_, id, access);
      if (op.kind == OpKind::read) moved = check_nvme_read(id, access.page);
      const uint64_t skipped = check_part(id, op, access);
      uint64_t offset = access.offset;
      for (uint32_t i = 0; i < access.page_count; ++i) {
        const PageId page{access.page.value + i};
        const uint64_t bytes = access.page_count == 1 ? access.bytes : layout_.page(page).bytes;
        const Contents::Range range{access.slot, page, offset, offset + bytes, offset - skipped};
        if (access.mode != AccessMode::write) {
          moved = contents_.find(id, range);
          check_version(id, op, access, page, moved, repeats);
        }
        if (access.mode == AccessMode::read) {
          contents_.read(id, range);
        } else {
          contents_.write(id, range, version_made(op, page, moved, repeats));
        }
        offset += bytes;
      }
      if (offset != access.offset + access.bytes) {
        refuse(id, "an access covers {} bytes, its pages {}", access.bytes, offset - access.offset);
      }
      if (op.kind == OpKind::write) check_nvme_write(id, access, moved);
    }
    if (op.kind == OpKind::update) check_state_place(program_, layout_, id);
    if (op.kind == OpKind::all_gather) check_gathered(id, op);
  }

  /// Accesses cover whole pages, from their beginning. Exceptions: the parts of a layer's sums,
  /// whose place in it is returned, and the remainders that an update reads while moments are zero.
  uint64_t check_part(OpId id, const Op& op, const Access& access) const {
    const Page& page = layout_.page(access.page);
    if (access.page_count > 1) return 0;
    uint64_t skipped = 0, bytes = page.bytes;
    if (page.kind == PageKind::gradient_sum && op.kind == OpKind::export_gradient) {
      const Chunk& chunk = layout_.chunk(op.layer, op.index);
      skipped = chunk.begin * sizeof(float);
      bytes = chunk.parameters * sizeof(float);
    } else if (page.kind == PageKind::gradient_sum && takes_own_part(op.kind)) {
      bytes = layout_.shard(op.layer) * sizeof(float);
      skipped = layout_.options.rank * bytes;
    } else if (page.kind == PageKind::optimizer && program_.kind.moments_zero) {
      bytes = std::min(bytes, access.bytes);
    }
    if (access.bytes != bytes || access.offset < skipped) {
      refuse(id, "an access covers {} bytes of {}, not {}", access.bytes, page_name(page), bytes);
    }
    return skipped;
  }

  /// Everything takes the newest version; only the update that is repeated starts again from the
  /// old one, which is moved to it.
  void check_version(OpId id, const Op& op, const Access& access, PageId page, uint32_t found,
                     bool repeats) {
    uint32_t wanted = newest_[page.value];
    const bool state = may_be_old_[page.value];
    const bool transfers = moves_pages(op.kind);
    if (transfers && state && found + 1 == wanted) return;
    const bool gradient = layout_.page(page).kind == PageKind::gradient;
    if (repeats) {
      wanted = gradient ? gradient_used_[page.value] : wanted - 1;
    } else if (op.kind == OpKind::update && gradient) {
      gradient_used_[page.value] = found;
    }
    if (found == wanted) return;
    refuse(id, "finds version {} of {} in slot {}, not {}", found, page_name(layout_.page(page)),
           access.slot.value, wanted);
  }

  /// What is gathered behind an update is this rank's new weights.
  void check_gathered(OpId id, const Op& op) const {
    if (!layout_.gathers_updates(op.layer)) return;
    for (uint32_t c = 0; c < layout_.chunk_count(op.layer); ++c) {
      const bool changes = trains_[op.layer][c] && layout_.owns(layout_.chunk(op.layer, c));
      if (changes && updated_[layout_.weight(op.layer, c).value] == 0) {
        refuse(id, "gathers weights that are not updated");
      }
    }
  }

  /// The version that an access leaves: moved as it is, or a new one.
  uint32_t version_made(const Op& op, PageId page, uint32_t moved, bool repeats) {
    if (op.kind == OpKind::all_gather) {
      const Page& gathered = layout_.page(page);
      const bool changes = layout_.gathers_updates(op.layer) && gathered.kind == PageKind::weight &&
                           trains_[op.layer][gathered.index];
      return changes ? newest_[page.value] = 1 : newest_[page.value];
    }
    if (moves_pages(op.kind)) return moved;
    if (op.kind == OpKind::update) ++updated_[page.value];
    if (repeats) return newest_[page.value];
    // What was gathered before this rank's weights changed is old as well.
    if (layout_.page(page).kind == PageKind::weight) age_peer_weights(op.layer);
    return ++newest_[page.value];
  }

  void age_peer_weights(uint32_t layer) {
    for (uint32_t i = 0; i < layout_.whole_weight_count(layer); ++i) {
      const uint32_t page = layout_.first_whole_weight[layer].value + i;
      if (layout_.pages[page].kind == PageKind::peer_weight) ++newest_[page];
    }
  }

  void require_nvme(OpId id, PageId page) const {
    if (layout_.page(page).home == Tier::nvme) return;
    refuse(id, "{} has no home on NVMe", page_name(layout_.page(page)));
  }

  uint32_t check_nvme_read(OpId id, PageId page) {
    require_nvme(id, page);
    const uint32_t found = contents_.read_nvme(id, page).version, newest = newest_[page.value];
    const bool to_repeat = may_be_old_[page.value] && found + 1 == newest;
    if (found == newest || to_repeat) return found;
    refuse(id, "reads an old version of {}", page_name(layout_.page(page)));
  }

  void check_nvme_write(OpId id, const Access& access, uint32_t version) {
    require_nvme(id, access.page);
    const Page& page = layout_.page(access.page);
    // Also while moments are zero, when an update may read a part.
    if (access.bytes != page.bytes) refuse(id, "writes only a part of {}", page_name(page));
    contents_.write_nvme(id, access.page, {access.page, version});
    ++written_[access.page.value];
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
      const bool own = layout_.owns(layout_.chunk(page.layer, page.index));
      const bool changes = trains_[page.layer][page.index], owned = changes && own;
      const auto hold = [&](bool condition, const char* what) {
        if (condition) return;
        fail(ErrorCode::internal, "program verification: {}: {}", page_name(page), what);
      };
      hold(changes || (newest_[i] == 0 && written_[i] == 0), "is frozen, and written");
      hold(owned || page.kind == PageKind::weight || page.bytes == 0,
           "has state, and no use for it");
      if (gradient) {
        hold(newest_[i] == (owned && backward ? 1u : 0u), "is not left by the backward once");
      } else if (page.bytes > 0) {
        const uint32_t times = twice(page.layer) ? 2 : 1;
        hold(updated_[i] == (owned && updates ? times : 0u), "has the wrong number of updates");
        hold(newest_[i] == (changes && updates ? 1u : 0u), "has not one new version");
      }
      const bool kept = page.bytes > 0 && (!gradient || (backward && !in_backward));
      hold(!kept || contents_.version_at_home(PageId{i}) == newest_[i],
           "does not end in its newest version at home");
    }
  }

  const Program& program_;
  const Layout& layout_;
  Contents contents_;
  std::vector<uint32_t> newest_;             ///< version of each page
  std::vector<uint32_t> updated_, written_;  ///< times each page was, by updates and to NVMe
  std::vector<uint32_t> gradient_used_;      ///< the version that a page's update took
  std::vector<char> may_be_old_;             ///< weights and state of layers updated twice
  std::vector<std::vector<char>> trains_;    ///< per layer and chunk
  OpOrder order_;
};

}  // namespace

void verify_program(const Program& program, const Layout& layout) {
  Verifier(program, layout).run();
}

}  // namespace overspill
