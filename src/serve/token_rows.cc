#include "serve/token_rows.h"

namespace kda::serve {

Status TokenRows::create(const Device& device, const Content& content, int64_t max_tokens) {
  device_ = &device;
  content_ = &content;
  KDA_SERVE_TRY(device.allocate(max_tokens * content.row_bytes(), rows_));
  if (device.is_host()) return {};
  KDA_SERVE_TRY(device.upload(content.row(0), kTableRows * content.row_bytes(), table_));
  kda_state_copy_desc d{};
  d.struct_size = sizeof d;
  d.pool = device.at(table_.data(), content.dtype(), {kTableRows, 1, 1, content.layout().stride});
  d.max_selected = max_tokens;
  kda_plan* plan = nullptr;
  KDA_SERVE_TRY(from_kda(kda_state_copy_plan_create(device.context(), &d, &plan)));
  copy_.reset(plan);
  return {};
}

Status TokenRows::gather(const Step& step, const StepViews& views) const {
  if (device_->is_host()) {
    content_->gather(step.content, rows_.data(), device_->host());
    return {};
  }
  kda_state_copy_args a{};
  a.struct_size = sizeof a;
  a.pool = device_->at(table_.data(), content_->dtype(), {kTableRows, 1, 1, content_->layout().stride});
  a.indices = views.content;
  a.packed = device_->at(rows_.data(), content_->dtype(), {views.tokens, 1, 1, content_->layout().stride});
  return from_kda(kda_state_gather(copy_.get(), &a, device_->stream()));
}

}  // namespace kda::serve
