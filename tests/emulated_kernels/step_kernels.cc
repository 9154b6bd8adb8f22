#include "cuda/kernels/decode_step/launch.cu"
#include "cuda/kernels/decode_step/launch_bf16.cu"
#include "cuda/kernels/decode_step/launch_fp16.cu"
#include "cuda/kernels/decode_step/launch_fp32.cu"
