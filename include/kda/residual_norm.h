/* libkda, C ABI: what stands between the layers of a model: the residual sum and the RMS norm of the next layer's
 * input, in one pass over the rows.
 *
 *   residual <- io(residual + add)                                              where `add` is given
 *   out      <- io(residual * rsqrt(mean_d(residual^2) + eps) * weight_d)       of the rounded residual
 *
 * Sums are fp32 in a fixed order: a row's bits depend on that row alone (spec N-12, N-13). On the reference backend
 * they are fp64.
 */
#ifndef KDA_RESIDUAL_NORM_H_
#define KDA_RESIDUAL_NORM_H_

#include <kda/context.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kda_residual_norm_desc {
  size_t struct_size;
  const char* backend; /* NULL = "auto" */
  int64_t hidden;      /* D */
  kda_dtype io_dtype;  /* of residual, add and out; 0 = bf16 */
  kda_dtype out_dtype; /* 0 = io_dtype; fp64 on the reference backend */
  double eps;          /* 0 = 1e-5 */
  int64_t max_tokens;  /* T bound */
} kda_residual_norm_desc;

typedef struct kda_residual_norm_args {
  size_t struct_size;
  kda_tensor residual; /* [T, D], rows dense; written if `add` is given */
  kda_tensor add;      /* optional [T, D]: what the layer before gave */
  kda_tensor weight;   /* optional [D] fp32; absent = 1 */
  kda_tensor out;      /* [T, D] */
} kda_residual_norm_args;

KDA_API kda_status kda_residual_norm_plan_create(kda_context* context, const kda_residual_norm_desc* desc,
                                                 kda_plan** out);
KDA_API kda_status kda_residual_norm_run(const kda_plan* plan, const kda_residual_norm_args* args,
                                         kda_workspace workspace, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_RESIDUAL_NORM_H_ */
