// The projections of core mode: a step's token rows, gathered from the content's table (design.md 4). On the CPU by
// the context's threads; on another device by the library's own state copy, each table row one "state".
#pragma once

#include "serve/content.h"
#include "serve/device.h"
#include "serve/step_tables.h"

namespace kda::serve {

class TokenRows {
 public:
  Status create(const Device& device, const Content& content, int64_t max_tokens);
  // Row t of the step comes to `t * content.row_bytes()`.
  Status gather(const Step& step, const StepViews& views) const;
  char* data() const { return rows_.data(); }

 private:
  const Device* device_ = nullptr;
  const Content* content_ = nullptr;
  DeviceBuffer table_, rows_;
  PlanHandle copy_;
};

}  // namespace kda::serve
