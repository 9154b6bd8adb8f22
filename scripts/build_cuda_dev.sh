#!/usr/bin/env bash
# Builds the development programs of the fused prefill: scripts/build_cuda_dev.sh OUT_DIR
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:?output directory}
mkdir -p "$out"
flags=(-std=c++20 -gencode=arch=compute_90a,code=sm_90a -I"$root/src" -I"$root/tests/cuda")
nvcc "${flags[@]}" -O3 --threads 2 -Xptxas -v -c "$root/src/cuda/kernels/prefill_fused/launch.cu" -o "$out/launch.o" \
  2>"$out/ptxas.log" || { cat "$out/ptxas.log"; exit 1; }
grep -E "error|spill stores|Used" "$out/ptxas.log" | sort | uniq -c
for program in prefill_fused_dev prefill_fused_bench; do
  [ -f "$root/tests/cuda/$program.cu" ] || continue
  nvcc "${flags[@]}" -O2 "$root/tests/cuda/$program.cu" "$out/launch.o" -o "$out/$program"
done
