#!/usr/bin/env bash
# Builds the development programs of the fused prefill: scripts/build_cuda_dev.sh OUT_DIR
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:?output directory}
mkdir -p "$out"
flags=(-std=c++20 -gencode=arch=compute_90a,code=sm_90a -I"$root/src" -I"$root/tests/cuda")
for source in launch launch_staged; do
  nvcc "${flags[@]}" -O3 --threads 2 -Xptxas -v -c "$root/src/cuda/kernels/prefill_fused/$source.cu" \
    -o "$out/$source.o" 2>"$out/$source.log" || { cat "$out/$source.log"; exit 1; }
  grep -E "error|spill stores|Used|C75" "$out/$source.log" | sort | uniq -c
done
g++ -std=c++20 -O2 -I"$root/src" -c "$root/src/cuda/kernels/prefill_fused/choose.cc" -o "$out/choose.o"
for program in prefill_fused_dev prefill_fused_bench; do
  [ -f "$root/tests/cuda/$program.cu" ] || continue
  nvcc "${flags[@]}" -O2 "$root/tests/cuda/$program.cu" "$out"/*.o -o "$out/$program"
done
