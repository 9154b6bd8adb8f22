#!/usr/bin/env python3
"""Fails on an include that docs/design.md forbids. Usage: include_rules.py SOURCE_DIR"""
import pathlib
import re
import sys

# Folder -> what its files may include (prefixes of include paths); own folder always allowed.
RULES = {
    "include/kda": ["kda/"],
    "src/base": ["base/", "kda/"],
    "src/core": ["base/", "core/", "kda/"],
    "src/reference": ["base/", "core/", "reference/", "kda/"],
    "src/cpu": ["base/", "core/", "cpu/", "kda/", "hwy/"],
    "src/layer": ["base/", "core/", "layer/", "kda/"],
    "src/cuda/host": ["base/", "core/", "cuda/", "kda/"],
    "src/cuda/kernels": ["cuda/kernels/", "cuda/tile/", "cuda/ptx/"],
    "src/cuda/tile": ["cuda/tile/", "cuda/ptx/"],
    "src/cuda/ptx": ["cuda/ptx/"],
    "src/capi": ["base/", "core/", "cpu/", "reference/", "layer/", "cuda/host/", "capi/", "kda/"],
    "src/conformance": ["conformance/", "kda/"],
    "src/serve": ["serve/", "conformance/", "kda/"],
    "tools/kda": ["tools/", "serve/", "conformance/", "bench/", "kda/"],
    "bench": ["bench/", "conformance/", "kda/"],
    "bindings/torch": ["kda/", "bindings/"],
}
PROJECT_PREFIXES = ("base/", "core/", "layer/", "reference/", "cpu/", "cuda/", "capi/", "conformance/", "serve/", "tools/", "kda/", "bench/", "bindings/", "tests/")
CUDA_RUNTIME = re.compile(r"^(cuda_runtime|cuda\.h|cuda_fp16|cuda_bf16|cuda/ptx|cuda/std|cublas)")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)


def problems(root):
    for folder, allowed in RULES.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".hpp", ".cc", ".cu", ".cuh"}:
                continue
            text = path.read_text()
            name = path.relative_to(root)
            for include in INCLUDE.findall(text):
                if CUDA_RUNTIME.match(include) and not str(name).startswith("src/cuda"):
                    yield f"{name}: the CUDA runtime belongs to src/cuda alone: {include}"
                elif include.startswith(PROJECT_PREFIXES) and not include.startswith(tuple(allowed)):
                    if not CUDA_RUNTIME.match(include):
                        yield f"{name}: may not include {include} (allowed: {', '.join(allowed)})"
                elif "torch/" in include and not str(name).startswith("bindings/"):
                    yield f"{name}: nothing outside bindings sees torch: {include}"
            if re.search(r"#\s*if.*KDA_WITH_CUDA", text) and str(name) != "src/capi/backends.cc":
                yield f"{name}: #ifdef KDA_WITH_CUDA stands in src/capi/backends.cc alone"


found = list(problems(pathlib.Path(sys.argv[1])))
print("\n".join(found) or "every include is allowed")
sys.exit(1 if found else 0)
