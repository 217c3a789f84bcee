// What a benchmark shows: one section each of the text, of the JSON object and of the page. Pure
// functions.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "engine/bench/bench_host.h"
#include "engine/bench/html_page.h"

namespace overspill {

struct BenchSection {
  std::string name;     ///< of the benchmark: its key in the JSON
  std::string heading;  ///< on the page
  std::string text;     ///< for the terminal
  std::string html;     ///< below the heading
  nlohmann::ordered_json json;
};

/// A section of tables, then plots (SVG), then notes.
BenchSection make_section(const std::string& name, const std::string& heading,
                          std::span<const BenchTable> tables, std::span<const std::string> plots,
                          std::span<const std::string> notes, nlohmann::ordered_json json);

/// One object: machine, kernel, started, and every section by its name.
std::string sections_json(const BenchHost& host, std::span<const BenchSection> sections);
std::string sections_html(const BenchHost& host, std::span<const BenchSection> sections);

/// A rate in 10^9 per second with three digits: "257", "3.8", "0.012".
std::string giga(double rate);

}  // namespace overspill
