#!/usr/bin/env python3
"""Checkpoints that kda replay must refuse, and some that it must take. Usage: checkpoint_test.py KDA

A refusal: exit code 2, one message on standard error that names file and tensor, nothing on standard output, no file left,
and before any work (spec L-1 to L-6, L-11).
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

KDA = pathlib.Path(sys.argv[1]).resolve()
PREFIX = "model.layers.0.self_attn."
SIZES = {"BF16": 2, "F32": 4, "F16": 2}


def layer(prefix=PREFIX, hidden=32, heads=2, value_heads=2, dim=8, rank=4, full=False):
    """name -> (dtype, shape); data is zeros, o_norm too."""
    keys, values = heads * dim, value_heads * dim
    tensors = {"q_proj.weight": [keys, hidden], "k_proj.weight": [keys, hidden], "v_proj.weight": [values, hidden],
               "b_proj.weight": [value_heads, hidden], "f_a_proj.weight": [rank, hidden],
               "f_b_proj.weight": [value_heads * dim, rank], "o_proj.weight": [hidden, values],
               "q_conv1d.weight": [keys, 1, 4], "k_conv1d.weight": [keys, 1, 4], "v_conv1d.weight": [values, 1, 4],
               "o_norm.weight": [dim]}
    if full:
        tensors["g_proj.weight"] = [values, hidden]
    else:
        tensors |= {"g_a_proj.weight": [rank, hidden], "g_b_proj.weight": [values, rank]}
    named = {prefix + name: ("BF16", shape) for name, shape in tensors.items()}
    return named | {prefix + "A_log": ("F32", [value_heads]), prefix + "dt_bias": ("F32", [value_heads * dim])}


def save(path, tensors, cut=0):
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at - cut))


class Checkpoints(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.model = self.folder / "model"
        self.model.mkdir()
        self.trace = self.folder / "trace.jsonl"
        self.trace.write_text('{"timestamp": 0, "input_length": 70, "output_length": 3, "hash_ids": [0]}\n')

    def replay(self, *options):
        return subprocess.run([KDA, "replay", self.trace, "--mode", "layer", "--checkpoint", self.model, "--cache-mib", "1",
                               *options], capture_output=True, text=True, timeout=120, cwd=self.folder)

    def config(self, **keys):
        (self.model / "config.json").write_text(json.dumps(keys))

    def index(self, places):
        (self.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    def taken(self, *options):
        r = self.replay(*options)
        self.assertEqual(r.returncode, 0, r.stderr)

    def refused(self, *parts, options=()):
        before = sorted(self.folder.rglob("*"))
        r = self.replay(*options)
        self.assertEqual(r.returncode, 2, (r.stdout, r.stderr))
        lines = [line for line in r.stderr.splitlines() if not line.startswith("  ")]
        self.assertEqual(len(lines), 1, r.stderr)
        for part in parts:
            self.assertIn(part, r.stderr)
        self.assertEqual(r.stdout, "")
        self.assertEqual(sorted(self.folder.rglob("*")), before)

    def halves(self, change=lambda name, tensor: tensor):
        tensors = {name: change(name, tensor) for name, tensor in layer().items()}
        names = list(tensors)
        for shard, part in (("a", names[:7]), ("b", names[7:])):
            save(self.model / f"{shard}.safetensors", {n: tensors[n] for n in part})
        self.index({n: ("a" if i < 7 else "b") + ".safetensors" for i, n in enumerate(names)})
        return names

    def test_good_ones_are_taken(self):
        save(self.model / "model.safetensors", layer())
        self.taken("--io", "fp32", "--verify", "1")
        self.halves()
        (self.model / "model.safetensors").unlink()
        self.taken()

    def test_grouped_value_heads_are_taken(self):
        save(self.model / "model.safetensors", layer(value_heads=4))
        self.taken("--io", "fp32", "--verify", "1", "--spec", "2", "--spec-mode", "records")

    def test_missing_tensor(self):
        for name in ("q_proj.weight", "dt_bias", "o_norm.weight", "v_conv1d.weight", "f_b_proj.weight"):
            tensors = layer()
            del tensors[PREFIX + name]
            save(self.model / "model.safetensors", tensors)
            self.refused(str(self.model), PREFIX, name)

    def test_wrong_count(self):
        for name, shape in (("k_proj.weight", [16, 31]), ("dt_bias", [2]), ("A_log", [1]), ("v_conv1d.weight", [16, 1, 5])):
            save(self.model / "model.safetensors", layer() | {PREFIX + name: ("F32" if "_" in name and "." not in name else "BF16", shape)})
            self.refused("model.safetensors", PREFIX + name)

    def test_output_gates(self):
        save(self.model / "model.safetensors", layer() | {PREFIX + "g_proj.weight": ("BF16", [16, 32])})
        self.refused(str(self.model), "g_proj.weight", "g_a_proj.weight", "both")
        save(self.model / "model.safetensors", {n: t for n, t in layer().items() if ".g_" not in n})
        self.refused(str(self.model), "g_proj.weight", "neither")

    def test_unknown_tensor(self):
        for name, part in (("q_proj.bias", "not a tensor of a KDA layer"), ("k_conv1d.bias", "'q_conv1d.bias' beside it")):
            save(self.model / "model.safetensors", layer() | {PREFIX + name: ("BF16", [16])})
            self.refused("model.safetensors", PREFIX + name, part)

    def test_element_types(self):
        save(self.model / "model.safetensors", layer() | {PREFIX + "q_proj.weight": ("F16", [16, 32])})
        self.refused("model.safetensors", PREFIX + "q_proj.weight", "fp16")
        self.halves(lambda name, t: ("F32", t[1]) if name.endswith("v_proj.weight") else t)
        self.model.joinpath("model.safetensors").unlink()
        self.refused("a.safetensors", "v_proj.weight", "fp32", "bf16")

    def test_shards(self):
        names = self.halves()
        whole = (self.model / "b.safetensors").read_bytes()
        (self.model / "b.safetensors").write_bytes(whole[:-3])
        self.refused("b.safetensors", "tensor '")
        (self.model / "b.safetensors").unlink()
        self.refused("b.safetensors", "shard", PREFIX)
        (self.model / "b.safetensors").write_bytes(whole)
        self.index({names[0]: "a.safetensors", "model.norm.weight": "b.safetensors"})
        self.refused("b.safetensors", "model.norm.weight")
        (self.model / "model.safetensors.index.json").unlink()
        save(self.model / "c.safetensors", {names[3]: layer()[names[3]]})
        self.refused("a.safetensors", "c.safetensors", names[3])

    def test_config(self):
        save(self.model / "model.safetensors", layer())
        self.config(lower_bound=-5, linear_lower_bound=-4)
        self.refused("config.json", "linear_lower_bound")
        self.config(linear_attn_config={"kda_layers": [1, 2]})
        self.refused("config.json", "layer 1")
        (self.model / "config.json").write_text("{")
        self.refused("config.json", "JSON")

    def test_softplus_and_a_bounded_backend(self):
        save(self.model / "model.safetensors", layer())
        self.refused("fused", options=["--prefill-backend", "fused"])
        self.refused("2 heads", options=["--tp", "4"])
        self.refused("--layers", options=["--layers", "2"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
