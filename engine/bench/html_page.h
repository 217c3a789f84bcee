// The frame of the benchmarks' pages: one file each, with its styles, that needs nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace overspill {

/// A whole page: the title as its first heading, then the body.
std::string html_page(const std::string& title, const std::string& heading,
                      const std::string& body);
/// A paragraph that stands out.
std::string html_note(const std::string& text);

/// "4 MiB", where format_bytes says "4.00 MiB": for axes and narrow columns.
std::string short_bytes(uint64_t bytes);

/// Rows of cells under a row of headings; the first column is names.
struct BenchTable {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;  ///< of as many cells as columns
};
std::string table_html(const BenchTable& table);
/// Aligned for a terminal.
std::string table_text(const BenchTable& table);

}  // namespace overspill
