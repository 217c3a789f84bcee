// Sections put together.
#include "engine/bench/bench_section.h"

#include <fmt/format.h>

#include "engine/bench/svg_plot.h"

namespace overspill {

std::string giga(double rate) { return fmt::format("{:.3g}", rate * 1e-9); }

BenchSection make_section(const std::string& name, const std::string& heading,
                          std::span<const BenchTable> tables, std::span<const std::string> plots,
                          std::span<const std::string> notes, nlohmann::ordered_json json) {
  BenchSection section{
      .name = name, .heading = heading, .text = {}, .html = {}, .json = std::move(json)};
  if (!plots.empty()) {
    section.html += "<div class=\"plots\">\n";
    for (const std::string& plot : plots) section.html += plot;
    section.html += "</div>\n";
  }
  for (const BenchTable& table : tables) {
    section.text += (section.text.empty() ? "" : "\n") + table_text(table);
    section.html += table_html(table);
  }
  for (const std::string& note : notes) {
    section.text += fmt::format("note: {}\n", note);
    section.html += html_note(note);
  }
  return section;
}

std::string sections_json(const BenchHost& host, std::span<const BenchSection> sections) {
  nlohmann::ordered_json json = {
      {"machine", host.machine}, {"kernel", host.kernel}, {"started", host.started}};
  for (const BenchSection& section : sections) json[section.name] = section.json;
  // A path may hold bytes that are not UTF-8; replace them rather than throw.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string sections_html(const BenchHost& host, std::span<const BenchSection> sections) {
  std::string body = fmt::format("<p>{}; {}; {}.</p>\n", html_escaped(host.machine),
                                 html_escaped(host.kernel), html_escaped(host.started));
  for (const BenchSection& section : sections) {
    body += fmt::format("<h2>{}</h2>\n{}", html_escaped(section.heading), section.html);
  }
  return html_page("Overspill: this machine", "This machine as training uses it", body);
}

}  // namespace overspill
