// The commit of records mode in every layer (spec V-10, V-11), the same for both executors.
#pragma once

#include <span>
#include <vector>

#include "serve/layer_plans.h"
#include "serve/step_tables.h"

namespace kda::serve {

// What a commit reads and writes in one layer.
struct CommitLayer {
  kda_tensor A_log{}, dt_bias{}, state{}, conv{};
  kda_records records{};
};

class Commits {
 public:
  void reserve(int64_t requests);
  // Commits what the requests have accepted, so that column 0 holds it; done on return.
  Status run(const Device& device, const kda_plan* plan, std::span<Request* const> requests,
             std::span<const CommitLayer> layers, StepTables& tables, const kda_workspace& workspace);

 private:
  std::vector<int32_t> slots_, accepted_, seats_;
};

}  // namespace kda::serve
