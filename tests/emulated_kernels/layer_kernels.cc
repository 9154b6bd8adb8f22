// What the layer adds to the operators' kernels.
#include "cuda/kernels/projection_rows/launch.cu"
#include "cuda/kernels/residual_norm/launch.cu"
