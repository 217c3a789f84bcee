// Small plots as inline SVG: lines over a logarithmic axis, and stacked bars. Colours are told
// apart by the colour-blind, and every mark says its value when pointed at. Pure functions.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace overspill {

/// Text with &, <, > and quotes as entities.
std::string html_escaped(const std::string& text);

struct PlotLine {
  std::string name;  ///< in the legend; empty: not listed
  size_t colour = 0;
  bool dashed = false;
  std::vector<std::pair<double, double>> points;  ///< x ascending
};

struct LinePlot {
  std::string title, x_title, y_title;
  std::vector<std::pair<double, std::string>> x_ticks;  ///< values and labels; x is positive
  std::vector<PlotLine> lines;
};
std::string draw(const LinePlot& plot);

struct PlotBar {
  std::string label;
  std::vector<double> parts;  ///< stacked from below, one per name in BarPlot::parts
  bool marked = false;
};

struct BarPlot {
  std::string title, x_title, y_title;
  std::vector<std::string> parts;
  std::vector<PlotBar> bars;
};
std::string draw(const BarPlot& plot);

}  // namespace overspill
