// Programs as stable text, one line an op, for people, diffs and tests.
#pragma once

#include <string>

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// "W3.0": weights of layer 3, chunk 0. O optimizer, G gradient, S gradient sum, A activation
/// (layer.micro-batch), D activation gradient (micro-batch).
std::string page_name(const Page& page);
/// "weights of layer 3, chunk 0 of model.layers.2": for error messages.
std::string page_description(const Page& page);
/// The tiers, slots and homes of a layout.
std::string dump_layout(const Layout& layout);
std::string dump_program(const Program& program, const Layout& layout);

}  // namespace overspill
