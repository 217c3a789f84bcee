// Text for layouts and programs. Its format is covered by tests: change both together.
#include "engine/program/dump.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/base/units.h"

namespace overspill {
namespace {

char page_letter(PageKind kind) {
  switch (kind) {
    case PageKind::weight: return 'W';
    case PageKind::peer_weight: return 'P';
    case PageKind::optimizer: return 'O';
    case PageKind::gradient: return 'G';
    case PageKind::gradient_sum: return 'S';
    case PageKind::activation: return 'A';
    case PageKind::activation_gradient: return 'D';
  }
  return '?';
}

const char* kind_name(PageKind kind) {
  switch (kind) {
    case PageKind::weight: return "weights";
    case PageKind::peer_weight: return "other ranks' weights";
    case PageKind::optimizer: return "optimizer state";
    case PageKind::gradient: return "gradient";
    case PageKind::gradient_sum: return "gradient sum";
    case PageKind::activation: return "activation";
    case PageKind::activation_gradient: return "activation gradient";
  }
  return "?";
}

std::string access_text(const Access& access, const Layout& layout) {
  const char* sign = access.mode == AccessMode::read    ? ""
                     : access.mode == AccessMode::write ? ">"
                                                        : "*";
  const std::string count = access.page_count > 1 ? fmt::format("x{}", access.page_count) : "";
  return fmt::format("{}{}{}@s{}+{}", sign, page_name(layout.page(access.page)), count,
                     access.slot.value, access.offset);
}

}  // namespace

std::string page_name(const Page& page) {
  if (page.kind == PageKind::activation_gradient) return fmt::format("D{}", page.index);
  if (page.kind == PageKind::gradient_sum) return fmt::format("S{}", page.layer);
  return fmt::format("{}{}.{}", page_letter(page.kind), page.layer, page.index);
}

std::string page_description(const Page& page) {
  const bool per_batch =
      page.kind == PageKind::activation || page.kind == PageKind::activation_gradient;
  return fmt::format("{} of layer {}, {} {}", kind_name(page.kind), page.layer,
                     per_batch ? "micro-batch" : "chunk", page.index);
}

std::string dump_layout(const Layout& layout) {
  std::string text = fmt::format(
      "layout: {} layers, {} chunks of up to {} parameters, prefetch_depth {}\n"
      "device {} bytes, host {} bytes, nvme {} bytes\n",
      layout.model.layers.size(), layout.table.chunks.size(), layout.chunk_parameters,
      layout.prefetch_depth, layout.device_bytes, layout.host_bytes, layout.nvme_bytes);
  const PlanOptions& o = layout.options;
  if (o.ranks > 1) {
    text += fmt::format("rank {} of {}{}\n", o.rank, o.ranks,
                        o.shard_weights ? "" : ", weights on every rank");
  }
  if (o.replicas > 1) text += fmt::format("{} replicas\n", o.replicas);
  const std::vector<uint32_t> twice = layout.layers_updated_twice();
  if (!twice.empty()) text += fmt::format("updated twice: layers {}\n", fmt::join(twice, " "));
  for (size_t i = 0; i < layout.slots.size(); ++i) {
    const Slot& slot = layout.slots[i];
    text += fmt::format("s{} {} {} @{} {} bytes\n", i, slot.role, tier_name(slot.memory),
                        slot.offset, slot.bytes);
  }
  for (const Page& page : layout.pages) {
    if (page.kind == PageKind::gradient_sum || page.kind == PageKind::peer_weight) continue;
    text += fmt::format("{} {} {}", page_name(page), page.bytes, tier_name(page.home));
    text += page.home == Tier::nvme
                ? fmt::format(" @{}\n", page.home_offset)
                : fmt::format(" s{}+{}\n", page.home_slot.value, page.home_offset);
  }
  return text;
}

std::string dump_program(const Program& program, const Layout& layout) {
  const StepKind& k = program.kind;
  std::string text = fmt::format(
      "program: {} ops; forward {} backward {} pending_update {} moments_zero {} micro_batches "
      "{}\n",
      program.ops.size(), k.forward, k.backward, k.pending_update, k.moments_zero, k.micro_batches);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    text += fmt::format("{:>5} {:<10} {:<15} L{}.{} work {}", i, lane_name(op.lane),
                        op_name(op.kind), op.layer, op.index, op.work);
    for (const Access& access : program.accesses_of(op)) text += " " + access_text(access, layout);
    for (size_t d = 0; d < op.dep_count; ++d) {
      text += fmt::format("{}{}", d == 0 ? " after " : ",", program.deps_of(op)[d].value);
    }
    text += '\n';
  }
  return text;
}

}  // namespace overspill
