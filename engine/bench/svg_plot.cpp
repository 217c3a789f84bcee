// Geometry of the plots. Coordinates are written with one decimal: finer is invisible.
#include "engine/bench/svg_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace overspill {
namespace {

// Okabe and Ito 2008, without their yellow, which is too pale on white.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                    "#e69f00", "#56b4e9", "#444444"};
constexpr double kWidth = 460, kHeight = 280;
constexpr double kLeft = 48, kRight = 12, kTop = 34, kBottom = 66;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;

const char* colour(size_t index) { return kColours[index % std::size(kColours)]; }

/// The largest value of the axis and the distance of its lines: 1, 2 or 5 times a power of ten.
struct Scale {
  double top, step;
};
Scale scale_for(double most) {
  if (!(most > 0)) return {1, 0.5};
  const double rough = most / 4;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  const double digit = rough / power;
  const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
  return {step * std::ceil(most / step), step};
}

double y_of(double value, const Scale& scale) {
  return kTop + kPlotHeight * (1 - value / scale.top);
}

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const char* kind = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y,
                     anchor, kind, html_escaped(text));
}

/// Opening tag, titles, and the horizontal lines with their values.
std::string frame(const std::string& title, const std::string& x_title, const std::string& y_title,
                  const Scale& scale) {
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n",
                                kWidth, kHeight, html_escaped(title));
  svg += text_at(kLeft, 14, "start", title, " class=\"title\"");
  svg += text_at(6, 28, "start", y_title);
  const auto lines = static_cast<int>(std::lround(scale.top / scale.step));
  for (int i = 0; i <= lines; ++i) {
    const double value = scale.step * i, y = y_of(value, scale);
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" "
        "y2=\"{:.1f}\"/>\n",
        kLeft, kWidth - kRight, y, y);
    svg += text_at(kLeft - 6, y + 4, "end", fmt::format("{:g}", value));
  }
  return svg + text_at(kLeft + kPlotWidth / 2, kHeight - 32, "middle", x_title);
}

/// Names with a swatch in one row at the bottom.
std::string legend(const std::vector<std::pair<std::string, size_t>>& names) {
  std::string svg;
  double x = kLeft;
  for (const auto& [name, index] : names) {
    svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n",
                       x, kHeight - 20, colour(index));
    svg += text_at(x + 16, kHeight - 10, "start", name);
    x += 30 + 7 * static_cast<double>(name.size());
  }
  return svg;
}

std::string draw_line(const PlotLine& line, const Scale& scale, double first, double span) {
  std::string path, marks;
  for (const auto& [value, height] : line.points) {
    const double x = kLeft + kPlotWidth * (0.04 + 0.92 * (std::log2(value) - first) / span);
    const double y = y_of(height, scale);
    path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", x, y);
    marks += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"><title>{}: "
        "{:.3f}</title></circle>\n",
        x, y, line.dashed ? 2 : 3.5, colour(line.colour), html_escaped(line.name), height);
  }
  return fmt::format(
             "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n", path,
             colour(line.colour), line.dashed ? 1 : 2,
             line.dashed ? " stroke-dasharray=\"4 3\"" : "") +
         marks;
}

}  // namespace

std::string html_escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

std::string draw(const LinePlot& plot) {
  double most = 0;
  for (const PlotLine& line : plot.lines) {
    for (const auto& point : line.points) most = std::max(most, point.second);
  }
  const Scale scale = scale_for(most);
  std::string svg = frame(plot.title, plot.x_title, plot.y_title, scale);
  const double first = plot.x_ticks.empty() ? 0 : std::log2(plot.x_ticks.front().first);
  const double last = plot.x_ticks.empty() ? 0 : std::log2(plot.x_ticks.back().first);
  const double span = std::max(1e-9, last - first);
  for (const auto& [value, label] : plot.x_ticks) {
    const double x = kLeft + kPlotWidth * (0.04 + 0.92 * (std::log2(value) - first) / span);
    svg += text_at(x, kTop + kPlotHeight + 16, "middle", label);
  }
  std::vector<std::pair<std::string, size_t>> names;
  for (const PlotLine& line : plot.lines) {
    svg += draw_line(line, scale, first, span);
    if (!line.dashed) names.emplace_back(line.name, line.colour);
  }
  return svg + legend(names) + "</svg>\n";
}

std::string draw(const BarPlot& plot) {
  double most = 0;
  for (const PlotBar& bar : plot.bars) {
    double sum = 0;
    for (const double part : bar.parts) sum += part;
    most = std::max(most, sum);
  }
  const Scale scale = scale_for(most);
  std::string svg = frame(plot.title, plot.x_title, plot.y_title, scale);
  const double slot = kPlotWidth / static_cast<double>(std::max<size_t>(1, plot.bars.size()));
  for (size_t i = 0; i < plot.bars.size(); ++i) {
    const PlotBar& bar = plot.bars[i];
    const double x = kLeft + slot * (static_cast<double>(i) + 0.15);
    double below = 0;
    for (size_t part = 0; part < bar.parts.size(); ++part) {
      const double value = bar.parts[part], y = y_of(below + value, scale);
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"{}\"><title>{} {}: {:.3f}</title></rect>\n",
          x, y, slot * 0.7, y_of(below, scale) - y, colour(part), html_escaped(bar.label),
          html_escaped(plot.parts[part]), value);
      below += value;
    }
    if (bar.marked) svg += text_at(x + slot * 0.35, y_of(below, scale) - 4, "middle", "*");
    svg += text_at(x + slot * 0.35, kTop + kPlotHeight + 16, "middle", bar.label);
  }
  std::vector<std::pair<std::string, size_t>> names;
  for (size_t part = 0; part < plot.parts.size(); ++part)
    names.emplace_back(plot.parts[part], part);
  return svg + legend(names) + "</svg>\n";
}

}  // namespace overspill
