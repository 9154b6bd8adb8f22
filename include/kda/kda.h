/* libkda: Kimi Delta Attention on CPU and CUDA. The whole C ABI; conventions are in <kda/types.h>. */
#ifndef KDA_KDA_H_
#define KDA_KDA_H_

#include <kda/context.h>
#include <kda/conv.h>
#include <kda/decode.h>
#include <kda/device.h>
#include <kda/layer.h>
#include <kda/metadata.h>
#include <kda/prefill.h>
#include <kda/residual_norm.h>
#include <kda/state_copy.h>
#include <kda/state_pool.h>
#include <kda/tensor_file.h>
#include <kda/types.h>

#endif /* KDA_KDA_H_ */
