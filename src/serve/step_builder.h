// Turns a planned step into the tables that the operators read, and into the content of its token rows.
#pragma once

#include <span>

#include "serve/content.h"
#include "serve/prefix_cache.h"
#include "serve/step.h"

namespace kda::serve {

struct StepBuilderOptions {
  uint64_t seed = 0;
  double accept = 0;            // P: probability that a draft is kept
  int32_t width = 1;            // 1 + S
  bool records = false;         // records mode: one page per request, accepted 0 where nothing is recorded
  int32_t max_checkpoints = 0;  // Ck
  int64_t max_batch_tokens = 0, max_requests = 0;
};

// Most block boundaries that one chunk of at most `tokens` tokens can cross (spec K-6).
int32_t max_checkpoints(int64_t tokens);

// Drafts kept out of `drafts` that follow generated token `base`: up to the first rejection (design.md 4).
int32_t kept_drafts(uint64_t seed, double accept, int64_t request, int64_t base, int32_t drafts);

class StepBuilder {
 public:
  // `cache` may be null: nothing is checkpointed.
  StepBuilder(const Content& content, PrefixCache* cache, const StepBuilderOptions& options)
      : content_(content), cache_(cache), options_(options) {}

  // Gives the step's tables their capacity: later builds allocate nothing.
  void reserve(Step& step) const;
  void build(Step& step);
  // Looks up the table rows of a request's prompt from token `first` on, as many as a step may take.
  void look_ahead(Request& request, int64_t first) const;

 private:
  void prompt_rows(const Request& request, std::span<uint32_t> rows) const;
  void add_recurrent(Step& step, StepRow& row);
  void add_chunk(Step& step, StepRow& row, size_t n);

  const Content& content_;
  PrefixCache* cache_;
  StepBuilderOptions options_;
};

}  // namespace kda::serve
