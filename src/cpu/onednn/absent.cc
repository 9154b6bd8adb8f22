// A library without oneDNN.
#include "cpu/projections.h"

namespace kda::cpu {

const ProjectionBackend* onednn_projection() { return nullptr; }

}  // namespace kda::cpu
