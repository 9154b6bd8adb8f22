#include "core/projection.h"

#include <cstring>

#include "base/tensor.h"

namespace kda {

Result<ProjectionChoice> select_projection(const Context& context, kda_dtype io, const char* name) {
  const std::string_view asked = name == nullptr ? "auto" : name;
  ProjectionChoice choice;
  std::string names = "auto";
  bool known = asked == "auto";
  for (const ProjectionBackend* backend : context.backends->projections) {
    names += str_cat(", ", backend->name());
    const bool wanted = asked == "auto" ? backend->name() != "reference" : asked == backend->name();
    if (!wanted || choice.backend != nullptr) continue;
    known = true;
    Refusals r;
    if (backend_disabled(backend->name())) r.add("disabled", "a backend that is not in KDA_DISABLE", backend->name());
    if (backend->device() != context.device.type) {
      r.add("device_type", device_name(backend->device()), device_name(context.device.type));
    }
    backend->check(io, context, r);
    if (r.empty()) {
      choice.backend = backend;
    } else {
      choice.refused.push_back({std::string(backend->name()), r.text()});
    }
  }
  if (!known) return not_found("projection: wanted one of ", names, ", got \"", asked, "\"");
  if (choice.backend != nullptr) return choice;
  return unsupported("projection '", asked, "': no backend can serve it", list_refusals(choice.refused));
}

}  // namespace kda
