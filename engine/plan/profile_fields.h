// The keys of a profile's YAML, once for reading and for writing: each visit() shows every field
// of a section to a visitor. Internal to engine/plan.
#pragma once

#include "engine/plan/profile.h"

namespace overspill {

template <class Visitor>
void visit(Visitor& v, DrivesProfile& d) {
  v.count("count", d.count);
  v.rate("read", d.read);
  v.rate("write", d.write);
  v.rate("mixed_read", d.mixed_read);
  v.rate("mixed_write", d.mixed_write);
  v.seconds("latency", d.latency);
  v.seconds("cpu_seconds_per_gb", d.cpu_seconds_per_gb);
  v.bytes("capacity", d.capacity);
  v.bytes("endurance", d.endurance);
  v.drive_settings("settings", d.settings);
}

template <class Visitor>
void visit(Visitor& v, DriveSettings& s) {
  v.bytes("block_size", s.block_bytes);
  v.count("read_depth", s.read_depth);
  v.count("write_depth", s.write_depth);
}

template <class Visitor>
void visit(Visitor& v, LinkProfile& l) {
  v.rate("h2d", l.h2d);
  v.rate("d2h", l.d2h);
  v.rate("both_h2d", l.both_h2d);
  v.rate("both_d2h", l.both_d2h);
  v.rate_or_zero("all_h2d", l.all_h2d);
  v.rate_or_zero("all_d2h", l.all_d2h);
  v.seconds("latency", l.latency);
}

template <class Visitor>
void visit(Visitor& v, ComputePoint& p) {
  v.compute_op("op", p.op);
  v.rate("parameters", p.parameters);
  v.rate("tokens", p.tokens);
  v.rate("flops_per_second", p.flops_per_second);
}

template <class Visitor>
void visit(Visitor& v, GemmPoint& p) {
  v.size("m", p.m);
  v.size("n", p.n);
  v.size("k", p.k);
  v.rate("flops_per_second", p.flops_per_second);
}

template <class Visitor>
void visit(Visitor& v, DeviceProfile& d) {
  v.text("name", d.name);
  v.count("count", d.count);
  v.boolean("accelerator", d.accelerator);
  v.bytes("memory", d.memory);
  v.rate_or_zero("memory_bandwidth", d.memory_bandwidth);
  v.rate("peak_flops", d.peak_flops);
  v.rate("reduce_gradient", d.reduce_gradient);
  v.rate("export_gradient", d.export_gradient);
  v.list("compute", d.compute);
  v.list("gemm", d.gemm);
}

template <class Visitor>
void visit(Visitor& v, UpdateRate& u) {
  v.optimizer("optimizer", u.optimizer);
  v.state_format("state", u.state);
  v.rate("parameters_per_second", u.parameters_per_second);
}

template <class Visitor>
void visit(Visitor& v, HostProfile& h) {
  v.bytes("memory", h.memory);
  v.rate("memory_bandwidth", h.memory_bandwidth);
  v.count("cores", h.cores);
  v.matrix("numa_distances", h.numa_distances);
  v.seconds("update_latency", h.update_latency);
  v.list("updates", h.updates);
}

template <class Visitor>
void visit(Visitor& v, CollectiveProfile& c) {
  v.rate("all_gather", c.all_gather);
  v.rate("reduce_scatter", c.reduce_scatter);
  v.seconds("latency", c.latency);
}

template <class Visitor>
void visit(Visitor& v, HardwareProfile& p) {
  v.text("name", p.name);
  v.texts("sources", p.sources);
  v.section("device", p.device);
  v.section("link", p.link);
  v.section("host", p.host);
  v.section("drives", p.drives);
  v.section("collective", p.collective);
}

}  // namespace overspill
