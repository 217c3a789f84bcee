// Styles, and tables in both forms.
#include "engine/bench/html_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/base/units.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

constexpr const char* kStyles =
    "body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:1440px;"
    "margin:2em auto;padding:0 1em}\n"
    "h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #ddd;"
    "overflow-wrap:anywhere}\n"
    ".plots{display:flex;flex-wrap:wrap;gap:1em}.plots svg{flex:1 1 400px;max-width:470px}\n"
    "svg text{font:11px system-ui,sans-serif;fill:#444}svg .title{font-size:13px;"
    "font-weight:600;fill:#222}svg .grid{stroke:#e4e4e4}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #eee}"
    "th:first-child,td:first-child{text-align:left}tr.best{background:#eef6ff;font-weight:600}\n"
    "p.note{background:#fff6e0;padding:.4em .8em}.scroll{overflow-x:auto}\n";

std::string html_row(const char* tag, const std::vector<std::string>& cells) {
  std::string row = "<tr>";
  for (const std::string& cell : cells) {
    row += fmt::format("<{0}>{1}</{0}>", tag, html_escaped(cell));
  }
  return row + "</tr>\n";
}

}  // namespace

std::string html_page(const std::string& title, const std::string& heading,
                      const std::string& body) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{}</h1>\n{}"
      "</body>\n</html>\n",
      html_escaped(title), kStyles, html_escaped(heading), body);
}

std::string html_note(const std::string& text) {
  return fmt::format("<p class=\"note\">{}</p>\n", html_escaped(text));
}

std::string short_bytes(uint64_t bytes) {
  if (bytes % kMiB == 0) return fmt::format("{} MiB", bytes / kMiB);
  if (bytes % kKiB == 0) return fmt::format("{} KiB", bytes / kKiB);
  return format_bytes(bytes);
}

std::string table_html(const BenchTable& table) {
  std::string html = table.title.empty() ? "" : "<p>" + html_escaped(table.title) + "</p>\n";
  html += "<div class=\"scroll\"><table>\n" + html_row("th", table.columns);
  for (const auto& row : table.rows) html += html_row("td", row);
  return html + "</table></div>\n";
}

std::string table_text(const BenchTable& table) {
  std::vector<size_t> widths;
  for (const std::string& column : table.columns) widths.push_back(column.size());
  for (const auto& row : table.rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text = fmt::format("  {:<{}}", cells.front(), widths.front());
    for (size_t i = 1; i < cells.size(); ++i) text += fmt::format("  {:>{}}", cells[i], widths[i]);
    return text + "\n";
  };
  std::string text = table.title.empty() ? "" : table.title + "\n";
  text += line(table.columns);
  for (const auto& row : table.rows) text += line(row);
  return text;
}

}  // namespace overspill
