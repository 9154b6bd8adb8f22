#include "serve/commits.h"

namespace kda::serve {

void Commits::reserve(int64_t requests) {
  for (auto* v : {&slots_, &accepted_, &seats_}) v->reserve(static_cast<size_t>(requests));
}

Status Commits::run(const Device& device, const kda_plan* plan, std::span<Request* const> requests,
                    std::span<const CommitLayer> layers, StepTables& tables, const kda_workspace& workspace) {
  slots_.clear();
  accepted_.clear();
  seats_.clear();
  for (const Request* r : requests) {
    slots_.push_back(static_cast<int32_t>(r->pages[0]));
    accepted_.push_back(r->accepted);
    seats_.push_back(r->seat);
  }
  CommitViews views;
  KDA_SERVE_TRY(tables.place(slots_, accepted_, seats_, views));
  for (const CommitLayer& layer : layers) {
    kda_commit_args a{};
    a.struct_size = sizeof a;
    a.A_log = layer.A_log;
    a.dt_bias = layer.dt_bias;
    a.state = layer.state;
    a.slots = views.slots;
    a.accepted = views.accepted;
    a.records = layer.records;
    a.records.record_rows = views.seats;
    a.conv_state[0] = layer.conv;
    KDA_SERVE_TRY(from_kda(kda_commit_run(plan, &a, workspace, device.stream())));
  }
  return device.synchronize();
}

}  // namespace kda::serve
