#include "cuda/kernels/decode/launch_lean_bf16.cu"
#include "cuda/kernels/decode/launch_lean_fp16.cu"
#include "cuda/kernels/decode/launch_lean_fp32.cu"
