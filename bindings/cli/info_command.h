// `overspill info`: what the engine sees of this machine and its settings.
#pragma once

namespace overspill {

/// Prints to stdout, as aligned text or as one JSON object; throws Error(io) when the topology
/// cannot be read.
void run_info(bool as_json);

}  // namespace overspill
