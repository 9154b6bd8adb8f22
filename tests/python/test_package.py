"""The package without any other: structs as the C compiler lays them out, plans over DLPack, errors, `python -m libkda`."""

import ctypes
import gc
import inspect
import json
import shutil
import subprocess
import sys
import weakref

import pytest

import libkda
from libkda import _abi, _structs, tensors

STRUCTS = [v for v in vars(_abi).values() if isinstance(v, type) and issubclass(v, ctypes.Structure) and hasattr(v, "_fields_")]


def test_structs_are_those_of_the_headers(tmp_path):
    """Size and every offset, as a C compiler of this machine sees them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    lines = [f'printf("{s.__name__} %zu\\n", sizeof({s.__name__}));' for s in STRUCTS]
    lines += [f'printf("{s.__name__}.{f} %zu\\n", offsetof({s.__name__}, {f}));' for s in STRUCTS for f, *_ in s._fields_]
    source = tmp_path / "sizes.c"
    source.write_text("#include <kda/kda.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n")
    program = tmp_path / "sizes"
    subprocess.run([compiler, "-std=c11", f"-I{libkda.get_include()}", str(source), "-o", str(program)], check=True)
    said = dict(
        line.split() for line in subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    )
    assert len(STRUCTS) > 30
    for s in STRUCTS:
        assert int(said[s.__name__]) == ctypes.sizeof(s), s.__name__
        for field, *_ in s._fields_:
            assert int(said[f"{s.__name__}.{field}"]) == getattr(s, field).offset, (s.__name__, field)


def test_info():
    text = subprocess.run([sys.executable, "-m", "libkda", "info"], capture_output=True, text=True, check=True).stdout
    assert libkda.version() in text and libkda.source_hash() in text and "cpu" in text
    facts = json.loads(
        subprocess.run([sys.executable, "-m", "libkda", "info", "--json"], capture_output=True, text=True, check=True).stdout
    )
    assert facts["version"] == libkda.__version__ and facts["devices"][0]["device"] == "cpu"
    wrong = subprocess.run([sys.executable, "-m", "libkda", "inform"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "inform" in wrong.stderr


def public(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield name, thing
            for member, function in vars(thing).items():
                if not member.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                    yield f"{name}.{member}", function.fget if isinstance(function, property) else function
        elif callable(thing):
            yield name, thing


@pytest.mark.parametrize("module", ["libkda", "libkda.torch"])
def test_public_functions_are_documented_and_typed(module):
    if module == "libkda.torch":
        pytest.importorskip("torch")
        pytest.importorskip("libkda.torch")
    found = list(public(sys.modules.get(module) or __import__(module)))
    assert len(found) > 10
    for name, thing in found:
        if isinstance(thing, type) or "." not in name:
            assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            hints = {p for p in inspect.signature(thing).parameters if p != "self"} | {"return"}
            assert hints <= set(thing.__annotations__), name


def dense(values, dtype, context, *shape):
    """A libkda tensor filled from Python numbers."""
    t = libkda.empty(shape, dtype, context)
    kind = {"float32": ctypes.c_float, "int32": ctypes.c_int32}[dtype]
    memory = (kind * len(values)).from_address(t.pointer)
    memory[:] = values
    return t, memory


def test_a_plan_needs_no_other_package():
    """F21: taps 0.25, 0.5, 1, 2 over 4, 5, 6, 7 with history 1, 2, 3, without activation."""
    context = libkda.Context("cpu", num_threads=1)
    plan = libkda.ConvPlan(
        context, mode="prefill", width=4, parts=1, channels=[1], io_dtype="fp32", layout="sd", max_tokens=8, max_sequences=1,
        initial_state="all", no_activation=1,
    )  # fmt: skip
    assert plan.backend and plan.isa in libkda.cpu_isas() and plan.workspace_size >= 0
    x, _ = dense([4, 5, 6, 7], "float32", context, 4, 1)
    weight, _ = dense([0.25, 0.5, 1, 2], "float32", context, 1, 4)
    state, window = dense([1, 2, 3], "float32", context, 1, 3, 1)
    out, sums = dense([0] * 4, "float32", context, 4, 1)
    cu, _ = dense([0, 4], "int32", context, 2)
    slots, _ = dense([0], "int32", context, 1)
    plan.run(x=[x], weight=[weight], state=[state], out=[out], cu_seqlens=cu, slots=slots)
    assert list(sums) == [12.25, 16, 19.75, 23.5] and list(window) == [5, 6, 7]


def test_wrong_descriptions_and_runs_are_named():
    context = libkda.Context("cpu", num_threads=1)
    norm = {"num_value_heads": 2, "value_dim": 4, "io_dtype": "fp32", "max_tokens": 8}
    with pytest.raises(TypeError, match="'heads'; it has .*num_value_heads"):
        libkda.GatedNormPlan(context, heads=2)
    with pytest.raises(ValueError, match="gate_family: wanted one of .*softplus.*got 'tanh'"):
        libkda.PrefillPlan(context, num_heads=1, key_dim=4, value_dim=4, gate_family="tanh")
    with pytest.raises(libkda.Unsupported, match="fused.*wanted") as caught:
        libkda.PrefillPlan(
            context,
            num_heads=1,
            key_dim=4,
            value_dim=4,
            gate_family="softplus",
            max_tokens=8,
            max_sequences=1,
            backend="fused",
        )
    assert isinstance(caught.value, NotImplementedError) and caught.value.status == "UNSUPPORTED"
    with pytest.raises(ValueError, match="device: wanted 'cpu'"):
        libkda.Context("tpu")
    plan = libkda.GatedNormPlan(context, **norm)
    o, _ = dense([0] * 8, "float32", context, 1, 2, 4)
    with pytest.raises(libkda.InvalidArgument, match="z: wanted .*got") as caught:
        plan.run(o=o, weight=o, out=o)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(TypeError, match="o: wanted a tensor with __dlpack__, got list"):
        plan.run(o=[1.0], z=o, weight=o, out=o)
    listed = libkda.candidates(context, "gated_norm", **norm)
    assert [c.name for c in listed if c.chosen] == [plan.backend]
    context.seal()
    with pytest.raises(libkda.PreconditionFailed):
        libkda.GatedNormPlan(context, **norm)


def test_dlpack_in_and_out():
    numpy = pytest.importorskip("numpy")
    context = libkda.Context("cpu", num_threads=1)
    mine, values = dense([1, 2, 3, 4, 5, 6], "float32", context, 2, 3)
    theirs = numpy.from_dlpack(mine)
    assert theirs.tolist() == [[1, 2, 3], [4, 5, 6]] and theirs.ctypes.data == mine.pointer
    values[0] = 9
    assert theirs[0, 0] == 9
    back = libkda.from_dlpack(numpy.arange(24, dtype=numpy.int64).reshape(2, 3, 4)[:, ::2, 1:])
    assert (back.shape, back.strides, back.dtype, back.device) == ((2, 2, 3), (12, 8, 1), "int64", "cpu")
    with pytest.raises(ValueError, match="array: wanted one of float32"):
        libkda.from_dlpack(numpy.zeros(2, dtype=numpy.complex64))


def test_dlpack_keeps_and_frees_memory():
    numpy = pytest.importorskip("numpy")
    context = libkda.Context("cpu", num_threads=1)
    mine, _ = dense([1, 2], "float32", context, 2)
    gone = weakref.ref(mine)
    mine.__dlpack__()  # a capsule that nobody takes
    theirs = numpy.from_dlpack(mine)
    assert len(tensors._exported) == 1
    del mine
    gc.collect()
    assert gone() is not None and theirs.tolist() == [1, 2]
    del theirs
    gc.collect()
    assert gone() is None and not tensors._exported


def test_state_pool_views():
    context = libkda.Context("cpu", num_threads=1)
    pool = libkda.StatePool(
        context,
        num_layers=2,
        num_value_heads=2,
        key_dim=4,
        value_dim=3,
        pages=5,
        conv_channels=6,
        conv_width=4,
        null_slot=0,
    )
    state, conv = pool.state(1), pool.conv(1)
    assert state.shape == (5, 2, 3, 4) and conv.shape == (5, 3, 6) and state.strides[1:] == (12, 4, 1)
    pages = pool.allocate(3)
    assert 0 not in pages and pool.available == 1
    pool.free(pages)
    with pytest.raises(libkda.InvalidArgument):
        pool.free(pages)
    with pytest.raises(libkda.OutOfMemory):
        pool.allocate(9)
    with pytest.raises(libkda.NotFound):
        pool.state(2)


def test_devices():
    cpu = libkda.devices()[0]
    assert cpu.device == "cpu" and cpu.multiprocessors >= 1


def test_flat_keywords_reach_nested_structs():
    routed = _structs.route(
        _abi.kda_decode_step_desc, {"num_heads": 2, "width": 3, "conv_width": 4, "attention": {"key_dim": 8}}
    )
    assert routed == {"decode": {"width": 3, "attention": {"num_heads": 2, "key_dim": 8}}, "conv_width": 4}
