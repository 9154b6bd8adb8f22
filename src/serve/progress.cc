#include "serve/progress.h"

#include <fmt/format.h>

namespace kda::serve {

Progress::Progress(std::FILE* out, bool terminal)
    : out_(out), terminal_(terminal), next_s_(terminal ? 0 : kPlainInterval) {}

std::string Progress::text(const Engine& engine) {
  const RunStats& s = engine.stats();
  const double now = engine.clock().seconds();
  const int64_t done = s.cached + s.prefilled;
  // Prompt tokens tell how far the run is; a tail of decodes is not foreseen.
  const double left = done > 0 ? now * static_cast<double>(s.prompt - done) / static_cast<double>(done) : 0;
  std::string cache;
  if (s.cache_capacity > 0) {
    cache = fmt::format(", cache {:.0f}%",
                        100.0 * static_cast<double>(s.cache_blocks) / static_cast<double>(s.cache_capacity));
  }
  return fmt::format("{}/{} requests, {:.1f} k tokens/s, batch {}, pool {}/{}{}, {:.0f} s, ETA {:.0f} s",
                     s.finished + s.failed, s.total,
                     now > 0 ? static_cast<double>(s.prefilled + s.decoded) / now / 1e3 : 0.0,
                     engine.scheduler().running().size(), s.used_slots, s.slots, cache, now, left);
}

std::string Progress::text(const VerifyProgress& v) {
  return fmt::format("verified {}/{} requests, {:.0f}% of the work, {:.0f} s, ETA {:.0f} s", v.done, v.requests,
                     100 * v.share, v.seconds, v.share > 0 ? v.seconds * (1 - v.share) / v.share : 0.0);
}

template <class Source>
void Progress::print(double now, const Source& source) {
  if (now < next_s_) return;
  next_s_ = now + (terminal_ ? 0.2 : kPlainInterval);
  if (terminal_) {
    std::fprintf(out_, "\r\x1b[K%s", text(source).c_str());
    open_ = true;
  } else {
    std::fprintf(out_, "%s\n", text(source).c_str());
  }
  std::fflush(out_);
}

void Progress::update(const Engine& engine) { print(engine.clock().seconds(), engine); }
void Progress::update(const VerifyProgress& verification) { print(verification.seconds, verification); }

void Progress::finish() {
  if (open_) std::fprintf(out_, "\r\x1b[K");
  open_ = false;
  next_s_ = terminal_ ? 0 : kPlainInterval;
  std::fflush(out_);
}

}  // namespace kda::serve
