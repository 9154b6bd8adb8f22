#!/usr/bin/env python3
"""kda run from outside: operators and a layer on files. Usage: run_test.py KDA VECTORS_DIR"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

KDA, VECTORS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()


def load(path):
    """name -> (dtype, shape, bytes)"""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    return {n: (e["dtype"], e["shape"], raw[8 + size + e["data_offsets"][0]:8 + size + e["data_offsets"][1]])
            for n, e in header.items()}


def save(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(tensor):
    dtype, _, content = tensor
    if dtype == "F32":
        return struct.unpack(f"<{len(content) // 4}f", content)
    return [struct.unpack("<f", b"\0\0" + content[i:i + 2])[0] for i in range(0, len(content), 2)]


def relative(x, reference):
    return (sum((a - b) ** 2 for a, b in zip(x, reference)) / sum(b * b for b in reference)) ** 0.5


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.given, self.written = self.folder / "in.safetensors", self.folder / "out.safetensors"

    def run_kda(self, operator, tensors, *options):
        save(self.given, tensors)
        return subprocess.run([KDA, "run", operator, "--in", self.given, "--out", self.written, *options],
                              capture_output=True, text=True, timeout=120)

    def refused(self, operator, tensors, *options, message):
        r = self.run_kda(operator, tensors, *options)
        self.assertEqual(r.returncode, 2, r.stdout + r.stderr)
        self.assertIn(message, r.stderr)
        self.assertFalse(self.written.exists())

    def prefill(self):
        v = load(VECTORS / "gva_prefill.safetensors")
        names = {"q": "q", "k": "k", "v": "v", "gate": "bounded.raw_g", "beta": "beta_logits", "A_log": "bounded.A_log",
                 "dt_bias": "bounded.dt_bias", "cu_seqlens": "cu_seqlens"}
        tensors = {to: v.get(name) or v[name.split(".")[-1]] for to, name in names.items()}
        wanted = {name: v[f"bounded.{name}"] for name in ("o", "final_state")}
        return tensors, wanted

    def test_prefill(self):
        tensors, wanted = self.prefill()
        r = self.run_kda("prefill", tensors, "--lower-bound", "-5")
        self.assertEqual(r.returncode, 0, r.stderr)
        out = load(self.written)
        self.assertEqual(sorted(out), ["final_state", "out"])
        self.assertLess(relative(floats(out["out"]), floats(wanted["o"])), 1.8e-3)
        self.assertLess(relative(floats(out["final_state"]), floats(wanted["final_state"])), 1e-5)

    def test_refusals(self):
        tensors, _ = self.prefill()
        bound = ("--lower-bound", "-5")
        self.refused("prefill", {**tensors, "extra": tensors["q"]}, *bound, message="tensor 'extra': wanted one of")
        self.refused("prefill", {n: t for n, t in tensors.items() if n != "q"}, *bound, message="'q'")
        self.refused("prefill", tensors, "--lower-bound", "0", message="--lower-bound")
        self.refused("prefill", tensors, *bound, "--heads", "3", message="num_value_heads")
        self.refused("prefill", tensors, *bound, "--backend", "fused", message="fused")
        self.refused("prefill", tensors, *bound, "--checkpoint", "x", message="--checkpoint")
        self.refused("layer", tensors, message="--checkpoint")
        self.refused("reply", tensors, message="reply")

    def test_layer(self):
        path = VECTORS / "layer_kimi_linear.safetensors"
        v = load(path)
        r = self.run_kda("layer", {"hidden": v["hidden_states"]}, "--checkpoint", path)
        self.assertEqual(r.returncode, 0, r.stderr)
        out = load(self.written)
        self.assertEqual(sorted(out), ["conv_state", "normed", "out", "state"])
        limit = 1.25 * relative(floats(v["bf16_run.out"]), floats(v["expected.out"]))
        self.assertLess(relative(floats(out["out"]), floats(v["expected.out"])), limit)
        self.assertLess(relative(floats(out["state"]), floats(v["expected.final_state"])), 1e-2)
        self.refused_after(path, v)

    def refused_after(self, path, v):
        self.written.unlink()
        hidden = {"hidden": v["hidden_states"]}
        self.refused("layer", hidden, "--checkpoint", path, "--layer", "1", message="layer: wanted below 1, got 1")
        self.refused("layer", hidden, "--checkpoint", path, "--ranks", "3", message="divides 2 heads")
        weights = dict(v)
        weights.pop("model.layers.0.self_attn.v_proj.weight")
        broken = self.folder / "broken.safetensors"
        save(broken, weights)
        self.refused("layer", hidden, "--checkpoint", broken, message="v_proj.weight")
        broken.write_bytes(path.read_bytes()[:-3])
        self.refused("layer", hidden, "--checkpoint", broken, message="broken.safetensors: tensor '")
        self.refused("layer", hidden, "--checkpoint", self.folder / "none", message="none")

    def test_norm_conv_and_decode(self):
        ones = struct.pack("<8f", *([1.0] * 8))
        zeros = struct.pack("<8f", *([0.0] * 8))
        r = self.run_kda("gated_norm", {"o": ("F32", [2, 1, 4], ones), "z": ("F32", [2, 1, 4], zeros),
                                        "weight": ("F32", [4], ones[:16])})
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertAlmostEqual(floats(load(self.written)["out"])[0], 0.5, places=4)
        r = self.run_kda("conv", {"x": ("F32", [2, 4], ones), "weight": ("F32", [4, 2], ones)}, "--no-activation")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(floats(load(self.written)["out"]), (1.0,) * 4 + (2.0,) * 4)
        v = load(VECTORS / "decode_32.safetensors")

        def step(name):  # the first of its steps
            dtype, shape, content = v[name]
            return dtype, [shape[1], *shape[2:]], content[:len(content) // shape[0]]

        state = v["initial_state"]
        if state[0] == "BF16":
            state = ("F32", state[1], struct.pack(f"<{len(state[2]) // 2}f", *floats(state)))
        r = self.run_kda("decode", {"q": step("q"), "k": step("k"), "v": step("v"), "gate": step("raw_g"),
                                    "beta": step("beta_logits"), "A_log": v["A_log"], "dt_bias": v["dt_bias"],
                                    "cu_seqlens": ("I32", [3], struct.pack("<3i", 0, 1, 2)), "state": state},
                         "--lower-bound", "-5")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertLess(relative(floats(load(self.written)["state"]), floats(v["state_after_step_1"])), 1e-5)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
