#include "cuda/kernels/decode/launch.cu"
#include "cuda/kernels/decode/launch_bf16.cu"
#include "cuda/kernels/decode/launch_fp16.cu"
#include "cuda/kernels/decode/launch_fp32.cu"
