// Charts as SVG text: bars over time and histograms. No script; colours are CSS classes of the page that holds them,
// and every bar says its value when it is pointed at.
#pragma once

#include <string>
#include <vector>

namespace kda::serve {

// &, <, > and quotes as entities.
std::string escaped(const std::string& text);
// A number for people: 1.23 k, 45.6 M; few digits.
std::string short_number(double x);

struct Series {
  std::string name;
  std::string css;  // class: a, b, c
  std::vector<double> values;
};
// A horizontal line, or in a histogram a vertical one.
struct Mark {
  std::string name;
  double at = 0;
};

// Bars between edges[i] and edges[i + 1] seconds, the series on top of one another. Empty without bars.
std::string bars_over_time(const std::string& label, const std::string& unit, const std::vector<double>& edges,
                           const std::vector<Series>& stacked, const std::vector<Mark>& marks = {});

// How many samples lie where, on a logarithmic axis. Samples that are not positive and finite are counted in words.
std::string log_histogram(const std::string& label, const std::string& unit, const std::vector<double>& samples,
                          const std::string& css, const std::vector<Mark>& marks = {});

}  // namespace kda::serve
