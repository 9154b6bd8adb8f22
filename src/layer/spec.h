// Descriptions of a KDA layer (kda_layer_spec): published models, one rank's share, what must hold.
#pragma once

#include "base/status.h"
#include "kda/layer.h"

namespace kda::layer {

// Rows of q, k, v behind one another.
inline int64_t channels(const kda_layer_spec& s) {
  return 2 * s.num_heads * s.key_dim + s.num_value_heads * s.value_dim;
}
inline int64_t keys(const kda_layer_spec& s) { return s.num_heads * s.key_dim; }            // H·K
inline int64_t gates(const kda_layer_spec& s) { return s.num_value_heads * s.key_dim; }     // HV·K
inline int64_t values(const kda_layer_spec& s) { return s.num_value_heads * s.value_dim; }  // HV·V

// The rows that the projections of x are written to, all by one product: q|k|v, then the output gate's g_a or g, f_a
// and b, each from a multiple of 16 elements on so that vectors can read it.
struct InRow {
  int64_t gate = 0, f_a = 0, b = 0;  // first columns
  int64_t width = 0;
};
InRow in_row(const kda_layer_spec& s);

// Fills in defaults and checks every field by name.
Status normalize(kda_layer_spec& spec);

// Spec L-3. NOT_FOUND lists the names.
Result<kda_layer_spec> model_spec(const char* name, int32_t* kda_layers);

// Spec L-6.
Result<kda_layer_spec> share(const kda_layer_spec& whole, int32_t ranks, int32_t rank);

// INVALID_ARGUMENT naming the first field in which the two differ.
Status same(const kda_layer_spec& wanted, const kda_layer_spec& got);

}  // namespace kda::layer
