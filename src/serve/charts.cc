#include "serve/charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace kda::serve {
namespace {

// User units of the drawing; a page shows one at 300 to 600 pixels.
constexpr double kWidth = 460, kHeight = 230, kLeft = 46, kRight = 12, kTop = 14, kBottom = 34;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;
constexpr double kBase = kTop + kPlotHeight;

struct Drawing {
  fmt::memory_buffer text;

  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text), format, std::forward<Args>(args)...);
  }
  Drawing(const std::string& label) {
    add("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight, escaped(label));
  }
  std::string finish() {
    add("<path class=\"axis\" d=\"M{} {}V{}H{}\"/>\n</svg>\n", kLeft, kTop, kBase, kWidth - kRight);
    return fmt::to_string(text);
  }
  void bar(const std::string& css, double x, double width, double bottom, double height, const std::string& title) {
    if (height <= 0) return;
    add("<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"><title>{}</title></rect>\n",
        css, x, bottom - height, std::max(width, 0.4), height, escaped(title));
  }
  void y_tick(double y, const std::string& name) {
    add("<path class=\"grid\" d=\"M{} {:.2f}H{}\"/><text x=\"{}\" y=\"{:.2f}\" class=\"y\">{}</text>\n", kLeft, y,
        kWidth - kRight, kLeft - 5, y + 4, name);
  }
  void x_tick(double x, const std::string& name) {
    add("<text x=\"{:.2f}\" y=\"{}\" class=\"x\">{}</text>\n", x, kBase + 14, name);
  }
  void x_name(const std::string& name) {
    add("<text x=\"{}\" y=\"{}\" class=\"x\">{}</text>\n", kLeft + kPlotWidth / 2, kHeight - 4, escaped(name));
  }
};

// About five steps of 1, 2 or 5 times a power of ten.
double tick_step(double range) {
  const double raw = range / 4, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (raw <= m * power * 1.0001) return m * power;
  }
  return 10 * power;
}

double draw_y_axis(Drawing& d, double highest) {
  const double step = tick_step(highest > 0 ? highest : 1),
               top = step * std::ceil((highest > 0 ? highest : 1) / step);
  for (double y = 0; y <= top * 1.0001; y += step) d.y_tick(kBase - y / top * kPlotHeight, short_number(y));
  return top;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string short_number(double x) {
  if (!std::isfinite(x)) return x > 0 ? "inf" : "?";
  const double size = std::abs(x);
  if (size >= 1e9) return fmt::format("{:.3g} G", x / 1e9);
  if (size >= 1e6) return fmt::format("{:.3g} M", x / 1e6);
  if (size >= 1e4) return fmt::format("{:.3g} k", x / 1e3);
  if (size >= 1000) return fmt::format("{:.0f}", x);
  return fmt::format("{:.3g}", x);
}

std::string bars_over_time(const std::string& label, const std::string& unit, const std::vector<double>& edges,
                           const std::vector<Series>& stacked, const std::vector<Mark>& marks) {
  if (edges.size() < 2) return "";
  const size_t bars = edges.size() - 1;
  const double begin = edges.front(), range = std::max(edges.back() - begin, 1e-9);
  double highest = 0;
  for (size_t i = 0; i < bars; ++i) {
    double sum = 0;
    for (const Series& s : stacked) sum += s.values[i];
    highest = std::max(highest, sum);
  }
  for (const Mark& m : marks) highest = std::max(highest, m.at);
  Drawing d(label);
  const double top = draw_y_axis(d, highest);
  const auto x_of = [&](double t) { return kLeft + (t - begin) / range * kPlotWidth; };
  for (size_t i = 0; i < bars; ++i) {
    double bottom = kBase;
    for (const Series& s : stacked) {
      const double height = s.values[i] / top * kPlotHeight, x = x_of(edges[i]);
      d.bar(s.css, x, x_of(edges[i + 1]) - x, bottom, height,
            fmt::format("{}: {} {} at {:.3g} s", s.name, short_number(s.values[i]), unit, edges[i]));
      bottom -= std::max(height, 0.0);
    }
  }
  for (const Mark& m : marks) {
    const double y = kBase - m.at / top * kPlotHeight;
    d.add("<path class=\"mark\" d=\"M{} {:.2f}H{}\"/><text x=\"{}\" y=\"{:.2f}\" class=\"end\">{}</text>\n", kLeft, y,
          kWidth - kRight, kWidth - kRight - 2, y - 3, escaped(m.name));
  }
  const double step = tick_step(range);
  for (double t = 0; t <= range * 1.0001; t += step) d.x_tick(x_of(begin + t), short_number(t));
  d.x_name("seconds since the start");
  return d.finish();
}

std::string log_histogram(const std::string& label, const std::string& unit, const std::vector<double>& samples,
                          const std::string& css, const std::vector<Mark>& marks) {
  std::vector<double> logs;
  for (const double x : samples) {
    if (x > 0 && std::isfinite(x)) logs.push_back(std::log10(x));
  }
  if (logs.empty()) return "";
  double low = *std::min_element(logs.begin(), logs.end()), high = *std::max_element(logs.begin(), logs.end());
  for (const Mark& m : marks) low = std::min(low, std::log10(m.at)), high = std::max(high, std::log10(m.at));
  low = std::floor(low * 10 - 0.5) / 10, high = std::ceil(high * 10 + 0.5) / 10;
  // Tenths of a decade, or as many parts of one as 60 bars give.
  const auto bars = static_cast<size_t>(std::clamp(std::round((high - low) * 10), 1.0, 60.0));
  const double each = (high - low) / static_cast<double>(bars);
  std::vector<double> counts(bars);
  for (const double x : logs) ++counts[std::min(bars - 1, static_cast<size_t>((x - low) / each))];
  Drawing d(label);
  const double top = draw_y_axis(d, std::max(4.0, *std::max_element(counts.begin(), counts.end())));  // whole ticks
  const auto x_of = [&](double x) { return kLeft + (x - low) / (high - low) * kPlotWidth; };
  for (size_t i = 0; i < bars; ++i) {
    const double from = low + static_cast<double>(i) * each;
    d.bar(css, x_of(from) + 0.5, kPlotWidth / static_cast<double>(bars) - 1, kBase, counts[i] / top * kPlotHeight,
          fmt::format("{}: {} to {} {}", counts[i], short_number(std::pow(10, from)),
                      short_number(std::pow(10, from + each)), unit));
  }
  double row = kTop + 8;
  for (const Mark& m : marks) {
    const double x = x_of(std::log10(m.at));
    d.add("<path class=\"mark\" d=\"M{:.2f} {}V{}\"/><text x=\"{:.2f}\" y=\"{}\" class=\"{}\">{}</text>\n", x, kTop,
          kBase, x > kWidth - 110 ? x - 3 : x + 3, row, x > kWidth - 110 ? "end" : "start", escaped(m.name));
    row += 13;
  }
  for (const double m : {0.0, std::log10(2), std::log10(5)}) {
    if (high - low > 2 && m > 0) break;
    for (double x = std::floor(low) + m; x <= high; ++x) {
      if (x >= low) d.x_tick(x_of(x), short_number(std::pow(10, x)));
    }
  }
  const size_t others = samples.size() - logs.size();
  d.x_name(others == 0 ? unit
                       : fmt::format("{}; {} of {} not shown: zero or not finite", unit, others, samples.size()));
  return d.finish();
}

}  // namespace kda::serve
