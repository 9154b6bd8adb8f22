// The report as one HTML page: figures first, then pictures, then what ran and why. Nothing is fetched and there is
// no script, so the page can be mailed and opened anywhere; it follows the reader's width and light or dark setting.
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "serve/charts.h"
#include "serve/replay.h"

namespace kda::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --paper: #fbfbf8; --ink: #22252b; --dim: #6a7079; --line: #dcdcd6; --card: #fff;
  --a: #2f6fb7; --b: #d9822b; --c: #4b9a62; --bad: #b3261e; --good: #22713c; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e6e2; --dim: #9aa1ab; --line: #333941;
  --card: #1d2126; --a: #6aa5e8; --b: #f0a35c; --c: #74c48c; --bad: #ff8a80; --good: #7ddc9b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1240px; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin: .2em 0; } h2 { font-size: 1.15em; margin: 1.6em 0 .3em; } p { margin: .3em 0; }
.dim, figcaption { color: var(--dim); font-size: .9em; }
.cards, .charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
.card, figure { margin: 0; padding: 10px 14px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card b { display: block; font-size: 1.35em; } figure > b { display: block; }
.good { color: var(--good); } .bad { color: var(--bad); }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); }
i.a { background: var(--a); } i.b { background: var(--b); } i.c { background: var(--c); }
i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .8em; border-radius: 2px; }
rect { shape-rendering: crispEdges; }
.grid { stroke: var(--line); } .axis { stroke: var(--dim); fill: none; } .mark { stroke: var(--bad); stroke-dasharray: 4 3; }
text.y, text.end { text-anchor: end; } text.x { text-anchor: middle; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .92em; }
td, th { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); }
)";

class Page {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }
  void section(const char* title, const char* says = "") {
    add("<h2>{}</h2>\n", title);
    if (*says != 0) add("<p class=\"dim\">{}</p>\n", says);
  }
  void card(const char* name, const std::string& value, const std::string& more, const char* css = "") {
    add("<div class=\"card\">{}<b class=\"{}\">{}</b><span class=\"dim\">{}</span></div>\n", name, css,
        escaped(value), escaped(more));
  }
  // A picture, or words where there is nothing to draw.
  void figure(const char* title, const std::string& svg, const std::vector<Series>& legend,
              const std::string& caption) {
    add("<figure><b>{}</b>\n", title);
    if (svg.empty()) add("<p class=\"dim\">no samples</p>\n");
    else add("{}", svg);
    add("<figcaption>");
    for (const Series& s : legend) add("<i class=\"{}\"></i>{}", s.css, escaped(s.name));
    add("{}{}</figcaption></figure>\n", legend.empty() || caption.empty() ? "" : ". ", caption);
  }
  std::string text() const { return fmt::to_string(text_); }

 private:
  fmt::memory_buffer text_;
};

std::string in_words(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "on" : "off";
  if (value.is_null()) return "none";
  return value.dump();
}

std::string milliseconds(double x) { return fmt::format("{:.3g} ms", x); }

void add_cards(Page& page, const Json& report, const RunStats& s) {
  page.add("<div class=\"cards\">\n");
  const Json& verify = report["verify"];
  if (verify["ok"].is_null()) {
    page.card("Verified", "nothing", "no request was recomputed");
  } else {
    const bool ok = verify["ok"].get<bool>();
    page.card("Verified", ok ? "right" : "WRONG",
              fmt::format("{} requests against the fp64 oracle", verify["requests"].get<int64_t>()),
              ok ? "good" : "bad");
    const auto error = [&](const char* key) { return verify[key].is_string() ? "inf" : short_number(verify[key]); };
    page.card("Largest error", error("max_rel_l2_out"),
              fmt::format("relative L2 of outputs, limit {:.2g}; {} of states, limit {:.2g}",
                          verify["tolerance"].get<double>(), error("max_rel_l2_state"),
                          verify["tolerance_state"].get<double>()));
  }
  page.card("Requests", fmt::format("{} of {}", s.finished, s.total), fmt::format("finished, {} failed", s.failed),
            s.failed > 0 ? "bad" : "");
  const Json& time = report["time"];
  page.card("Prefill", short_number(time["prefill_tokens_per_s"].get<double>()) + " tokens/s",
            fmt::format("{} computed, {} from the cache", short_number(static_cast<double>(s.prefilled)),
                        short_number(static_cast<double>(s.cached))));
  page.card("Decode", short_number(time["decode_tokens_per_s"].get<double>()) + " tokens/s",
            s.drafted > 0 ? fmt::format("{} tokens, {} of {} drafts kept",
                                        short_number(static_cast<double>(s.decoded)), s.accepted, s.drafted)
                          : short_number(static_cast<double>(s.decoded)) + " tokens");
  const Percentiles ttft = percentiles(s.ttft_ms), tpot = percentiles(s.tpot_ms);
  if (ttft.count > 0) page.card("First token, p50", milliseconds(ttft.p50), "p99 " + milliseconds(ttft.p99));
  if (tpot.count > 0) page.card("Per token, p50", milliseconds(tpot.p50), "p99 " + milliseconds(tpot.p99));
  page.card("Time", fmt::format("{:.3g} s", s.wall_s),
            fmt::format("{} steps, {:.0f} % of it in the operators", s.steps,
                        s.wall_s > 0 ? 100 * s.model_s / s.wall_s : 0.0));
  page.add("</div>\n");
}

// One value an interval.
template <class Value>
Series series(const History& history, const char* name, const char* css, const Value& value) {
  Series s{name, css, {}};
  for (const Interval& x : history.intervals()) s.values.push_back(value(x));
  return s;
}

double per(int64_t n, double of) { return of > 0 ? static_cast<double>(n) / of : 0; }

void add_course(Page& page, const RunStats& s) {
  const History& h = s.history;
  std::vector<double> edges;
  for (const Interval& x : h.intervals()) edges.push_back(x.begin_s);
  if (!edges.empty()) edges.push_back(h.intervals().back().end_s);
  const auto picture = [&](const char* title, const char* unit, const std::vector<Series>& stacked,
                           const char* caption, const std::vector<Mark>& marks = {}) {
    page.figure(title, bars_over_time(title, unit, edges, stacked, marks),
                stacked.size() > 1 ? stacked : std::vector<Series>(), caption);
  };
  page.section("Over time", "Each bar is a step, or several steps of a long run; pointing at one shows its value.");
  page.add("<div class=\"charts\">\n");
  picture("Prefill, tokens/s", "tokens/s",
          {series(h, "computed", "a", [](const Interval& x) { return per(x.prefilled, x.seconds()); }),
           series(h, "from the cache", "c", [](const Interval& x) { return per(x.cached, x.seconds()); })},
          "");
  picture("Decode, tokens/s", "tokens/s",
          {series(h, "decoded", "b", [](const Interval& x) { return per(x.decoded, x.seconds()); })},
          "Tokens that were kept; rejected drafts do not count.");
  picture(
      "Tokens of a step", "tokens",
      {series(h, "prompts", "a", [](const Interval& x) { return per(x.chunk_tokens, static_cast<double>(x.steps)); }),
       series(h, "decode", "b",
              [](const Interval& x) { return per(x.recurrent_tokens, static_cast<double>(x.steps)); })},
      "");
  picture(
      "Requests of a step", "requests",
      {series(h, "prompts", "a", [](const Interval& x) { return per(x.chunk_rows, static_cast<double>(x.steps)); }),
       series(h, "decode", "b",
              [](const Interval& x) { return per(x.recurrent_rows, static_cast<double>(x.steps)); })},
      "");
  picture(
      "Time of a step, ms", "ms",
      {series(h, "operators", "c",
              [](const Interval& x) { return 1e3 * x.operators_s / static_cast<double>(x.steps); }),
       series(h, "all else", "b",
              [](const Interval& x) { return 1e3 * (x.seconds() - x.operators_s) / static_cast<double>(x.steps); })},
      "All else: scheduling, tables, hashing, and waiting for arrivals.");
  picture("Waiting requests", "requests",
          {series(h, "waiting", "b", [](const Interval& x) { return static_cast<double>(x.waiting); })}, "");
  picture("State pool, slots in use", "slots",
          {series(h, "in use", "a", [](const Interval& x) { return static_cast<double>(x.used_slots); })}, "",
          {{fmt::format("{} slots", s.slots), static_cast<double>(s.slots)}});
  if (s.cache_capacity > 0) {
    picture("Prefix cache, blocks", "blocks",
            {series(h, "blocks", "c", [](const Interval& x) { return static_cast<double>(x.cache_blocks); })}, "",
            {{fmt::format("room for {}", s.cache_capacity), static_cast<double>(s.cache_capacity)}});
  }
  page.add("</div>\n");
}

std::vector<Mark> percentile_marks(const std::vector<double>& samples) {
  const Percentiles p = percentiles(samples);
  std::vector<Mark> marks;
  for (const auto& [name, at] : {std::pair{"p50", p.p50}, std::pair{"p90", p.p90}, std::pair{"p99", p.p99}}) {
    if (at > 0) marks.push_back({fmt::format("{} {:.3g}", name, at), at});
  }
  return marks;
}

void add_distributions(Page& page, const RunStats& s, const VerifyReport& v, const std::string& ttft_from) {
  page.section("Latency and error");
  page.add("<div class=\"charts\">\n");
  page.figure("Time to first token, requests",
              log_histogram("Time to first token", "ms", s.ttft_ms, "a", percentile_marks(s.ttft_ms)), {},
              "From " + ttft_from + ".");
  page.figure("Time per output token, requests",
              log_histogram("Time per output token", "ms", s.tpot_ms, "b", percentile_marks(s.tpot_ms)), {},
              "(last &minus; first) / (outputs &minus; 1).");
  std::vector<double> out, state;
  for (const RequestError& e : v.errors) {
    out.push_back(e.rel_out);
    state.push_back(e.rel_state);
  }
  page.figure("Error of outputs, verified requests",
              log_histogram("Error of outputs", "relative L2", out, "c", {{"limit", v.tolerance.out}}), {},
              "Against the fp64 oracle, over all output rows of a request.");
  page.figure("Error of final states, verified requests",
              log_histogram("Error of states", "relative L2", state, "c", {{"limit", v.tolerance.state}}), {}, "");
  page.add("</div>\n");
  for (const std::string& failure : v.failures) page.add("<p class=\"bad\">{}</p>\n", escaped(failure));
}

void add_choices(Page& page, const Json& choices) {
  page.section("What ran, and why",
               "For each operator the backend that was chosen, and why others were passed over.");
  page.add("<div class=\"table\"><table><tr><th>operator</th><th>ran</th><th>passed over</th></tr>\n");
  for (const auto& [op, c] : choices.items()) {
    std::string skipped;
    for (const Json& k : c["skipped"]) {
      // Candidates of another device are no news; the JSON report has them.
      if (!k["reasons"].empty() && k["reasons"][0].get<std::string>().starts_with("device_type:")) continue;
      skipped += fmt::format("<div>{}: ", escaped(k["candidate"].get<std::string>()));
      for (const Json& reason : k["reasons"]) skipped += escaped(reason.get<std::string>()) + "; ";
      skipped += "</div>";
    }
    page.add("<tr><td>{}</td><td>{} ({})</td><td>{}</td></tr>\n", escaped(op),
             escaped(c["backend"].get<std::string>()), escaped(c["isa"].get<std::string>()), skipped);
  }
  page.add("</table></div>\n");
}

void add_pairs(Page& page, const char* title, const Json& pairs) {
  page.section(title);
  page.add("<div class=\"table\"><table>\n");
  for (const auto& [key, value] : pairs.items())
    page.add("<tr><td>{}</td><td>{}</td></tr>\n", escaped(key), escaped(in_words(value)));
  page.add("</table></div>\n");
}

}  // namespace

std::string Replay::page_text() const {
  const RunStats& s = stats();
  // Through the JSON text, which has U+FFFD where a name is not UTF-8.
  const Json json = Json::parse(report_text());
  const Json& config = json["config"];
  const std::string name = fmt::format("{} on {}", in_words(config["model"]), in_words(config["device"]));
  Page page;
  page.add(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>kda replay: {}</title>\n<meta "
      "name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<style>{}</style></head><body>\n",
      escaped(name), kStyle);
  page.add(
      "<h1>kda replay: {}</h1>\n<p class=\"dim\">{}; heads {}, layers {}, io {}, states {}; {}; libkda {} ({})</p>\n",
      escaped(name), escaped(in_words(config["trace"])), in_words(config["rank_heads"]), in_words(config["layers"]),
      in_words(config["io"]), in_words(config["pool"]), escaped(isa_), in_words(json["build"]["version"]),
      in_words(json["build"]["source_hash"]));
  if (!complete()) page.add("<p class=\"bad\"><b>Incomplete: the run was interrupted.</b></p>\n");
  if (!s.first_failure.empty()) page.add("<p class=\"bad\">{}</p>\n", escaped(s.first_failure));
  add_cards(page, json, s);
  add_course(page, s);
  add_distributions(page, s, verification_, in_words(json["latency"]["ttft_from"]));
  add_choices(page, json["choices"]);
  add_pairs(page, "Configuration", config);
  page.add("</body></html>\n");
  return page.text();
}

}  // namespace kda::serve
