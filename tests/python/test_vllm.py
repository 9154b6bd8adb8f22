"""vLLM's three KDA layers on libkda: real layer classes and metadata builders, steps as the runner makes them (XV-31)."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("libkda.torch")
if os.environ.get("KDA_VLLM_DEVICE", "cpu") != "cpu":
    pytest.skip("vLLM is on its GPU platform in this process", allow_module_level=True)
pytest.importorskip("vllm", reason="vllm is not installed")
import vllm_steps
from vllm_steps import CLASSES, NAMES, Layer, Request, engine_config, error, reference, served

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm_registered")]


def test_M25_the_layer_is_libkdas_and_its_views_are_strided(kind):
    layer = Layer(kind, engine_config())
    part = layer.layer
    assert type(part).__name__ == f"LibKDA{NAMES[kind]}" and isinstance(part, CLASSES[kind])
    assert part.get_attn_backend().get_name() == ("LIBKDA_K3" if kind == "k3" else "LIBKDA_GDN")
    assert layer.builder._cudagraph_support == type(layer.builder).__mro__[2]._cudagraph_support
    conv, state = part.kv_cache
    assert state.stride(0) * state.element_size() == layer.page.shape[-1] > state[0].numel() * state.element_size()
    assert conv.data_ptr() == layer.page.data_ptr()


def test_chunked_prefill_mixed_and_decode_equal_one_request_alone(kind, layout, monkeypatch):
    """A request's bits do not depend on the steps it was served in: alone, among others, cut at multiples of 64."""
    vllm_steps.batch_invariant(monkeypatch)
    layer = Layer(kind, engine_config())
    assert layer.layer.libkda.shape.layout == layout
    alone = Request(1, 135, slots=[2], prompt=130)
    want = [layer.step([(alone, 130, 0)])[0]] + [layer.step([(alone, 1, 0)])[0] for _ in range(5)]
    a, b = Request(1, 135, slots=[5], prompt=130), Request(2, 80, slots=[9], prompt=77)
    c = Request(3, 40, slots=[4], prompt=9)
    got = [layer.step([(a, 64, 0)])[0], layer.step([(c, 9, 0), (a, 64, 0)])[1]]
    got.append(layer.step([(c, 1, 0), (a, 2, 0), (b, 64, 0)])[1])
    got.append(layer.step([(a, 1, 0), (c, 1, 0), (b, 13, 0)])[0])
    for _ in range(4):
        got.append(layer.step([(c, 1, 0), (a, 1, 0)])[1])
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert torch.equal(layer.state(a), layer.state(alone))
    exact, state = reference(layer, a, 135)
    assert error(torch.cat(got), exact) <= 1e-5 and error(layer.state(a), state) <= 1e-5
    exact, state = reference(layer, b, 77)
    assert error(layer.state(b), state) <= 1e-5
    assert served(kind) == {"prefill": 5, "decode": 11, "spec": 0}


def test_verify_with_rejected_drafts_equals_plain_decode(kind, layout, monkeypatch):
    vllm_steps.batch_invariant(monkeypatch)
    plain = Layer(kind, engine_config())
    alone = Request(1, 90, slots=[3], prompt=70)
    want = torch.cat([plain.step([(alone, 70, 0)])[0]] + [plain.step([(alone, 1, 0)])[0] for _ in range(20)])
    layer = Layer(kind, engine_config(drafts=2))
    a, b = Request(1, 90, slots=[1, 2, 3], prompt=70), Request(2, 90, slots=[6, 5, 4], prompt=66)
    c = Request(3, 200, slots=[7, 8, 9])
    got = list(layer.step([(a, 70, 0)]))
    layer.step([(b, 66, 0)])
    # (tokens of a, rejected of a, the same of b, tokens that c prefills beside them, where c stands)
    for at, (na, ra, nb, rb, nc) in enumerate(
        [
            (3, 0, 3, 2, 0),
            (3, 1, 1, 0, 64),
            (3, 2, 3, 0, 0),
            (1, 0, 2, 1, 1),
            (2, 0, 3, 1, 63),
            (3, 0, 3, 0, 0),
            (3, 1, 3, 2, 0),
        ]
    ):
        step = [(a, na, ra), (b, nb, rb)]
        if nc:
            step.insert(at % 3, (c, nc, 0))
        rows = layer.step(step, pad_requests=at % 2)[step.index((a, na, ra))]
        got.append(rows[: na - ra])
    got = torch.cat(got)
    assert torch.equal(got, want[: got.shape[0]])
    assert error(got, reference(layer, a, got.shape[0])[0]) <= 1e-5
    assert torch.equal(layer.layer.kv_cache[1][a.slots[a.accepted - 1]], _state_after(plain, kind, a.computed, want))
    assert error(layer.layer.kv_cache[1][c.slots[0]], reference(layer, c, c.computed)[1]) <= 1e-5
    assert served(kind)["spec"] == 7 and served(kind)["prefill"] == 2 + 5


def _state_after(layer, kind, tokens, _):
    request = Request(1, 90, slots=[11], prompt=70)
    layer.step([(request, 70, 0)])
    for _ in range(tokens - 70):
        layer.step([(request, 1, 0)])
    return layer.state(request).clone()


def test_the_device_decides_how_verify_windows_are_split(monkeypatch):
    """K3 under adaptive verification: the host knows how many tokens a mixed step has, the device whose they are."""
    vllm_steps.batch_invariant(monkeypatch)
    layers = [Layer("k3", engine_config(drafts=2), prefix=f"model.layers.{i}.attn") for i in range(2)]
    outs = []
    for layer, host in zip(layers, ([0, 3, 12, 13], [0, 2, 11, 13]), strict=True):
        a, b = Request(1, 90, slots=[1, 2, 3], prompt=70), Request(2, 90, slots=[4, 5, 6], prompt=66)
        c = Request(3, 90, slots=[7, 8, 9])
        layer.step([(a, 70, 0)])
        layer.step([(b, 66, 0)])
        common, _ = layer.metadata([(a, 3, 0), (c, 9, 0), (b, 1, 0)])
        common.query_start_loc_cpu = torch.tensor(host, dtype=torch.int32)
        drafts = torch.tensor([2, -1, 0], dtype=torch.int32)
        m = layer.builder.build(0, common, torch.ones(3, dtype=torch.int32), drafts)
        layer.metadata = lambda *_, common=common, m=m: (common, m)
        outs.append(torch.cat(layer.step([(a, 3, 0), (c, 9, 0), (b, 1, 0)])))
    assert torch.equal(*outs) and torch.equal(layers[0].page, layers[1].page)


def test_states_in_bfloat16():
    for kind in ("k3", "glm"):
        config = engine_config(dtype=torch.bfloat16)
        config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
        layer = Layer(kind, config)
        assert layer.layer.kv_cache[1].dtype == torch.bfloat16
        a = Request(1, 90, torch.bfloat16, slots=[3], prompt=80)
        rows = [layer.step([(a, 80, 0)])[0]] + [layer.step([(a, 1, 0)])[0] for _ in range(10)]
        want, state = reference(layer, a, 90)
        assert error(torch.cat(rows), want) <= 1e-2 and error(layer.state(a), state) <= 1e-2


def test_I02_padding_rows_and_the_null_block_are_left_alone(kind):
    layer = Layer(kind, engine_config(drafts=2))
    plain = Layer(kind, engine_config(), prefix="model.layers.1.attn")
    for part, spec in ((layer, True), (plain, False)):
        a = Request(1, 40, slots=[1, 2, 3] if spec else [1], prompt=20)
        before = part.page.clone()
        part.step([(a, 20, 0)], pad_requests=2, pad_tokens=5)
        part.step([(a, 3 if spec else 1, 0)], pad_requests=3, pad_tokens=6)
        touched = [1, 2, 3] if spec else [1]
        untouched = [s for s in range(part.page.shape[0]) if s not in touched]
        assert torch.equal(part.page[untouched], before[untouched])
        assert torch.equal(part.page[..., -vllm_steps.PAD_BYTES :], before[..., -vllm_steps.PAD_BYTES :])


def staged(
    state_indices, query_start_loc, num_accepted_tokens, staged_state_indices, staged_query_start_loc,
    staged_num_accepted_tokens, *, num_spec_decodes,
):  # fmt: skip
    """Stands in for a kernel of vLLM's that copies K3's tables into its buffers and pads them."""
    n = num_spec_decodes
    staged_state_indices[:n] = state_indices
    staged_state_indices[n:] = 0
    staged_query_start_loc[: n + 1] = query_start_loc
    staged_query_start_loc[n + 1 :] = query_start_loc[-1]
    staged_num_accepted_tokens[:n] = num_accepted_tokens
    staged_num_accepted_tokens[n:] = 1


def test_M26_tables_for_a_graph_lie_in_vllms_buffers(kind, monkeypatch):
    """With full graphs a decode or verify step reads the builder's persistent tables alone, padded with the null block."""
    if kind == "k3":
        monkeypatch.setattr("vllm.models.kimi_k3.nvidia.kda_metadata.stage_spec_decode_metadata", staged)
    for drafts in (0, 2):
        layer = Layer(kind, engine_config(drafts=drafts), prefix=f"model.layers.{drafts}.attn")
        layer.builder.use_full_cuda_graph = True
        requests = [Request(i, 30, slots=[i + 1, 10, 11][: 1 + drafts], prompt=5) for i in range(2)]
        for r in requests:
            r.computed = 6
        _, m = layer.metadata([(r, 1 + drafts, 0) for r in requests], pad_requests=3)
        group = m.libkda.spec if drafts else m.libkda.decode
        assert (m.libkda.prefill, m.libkda.decode if drafts else m.libkda.spec) == (None, None)
        assert group.slots.shape[0] == 5 and not group.slots[2:].any()
        owner = layer.builder.spec_state_indices_tensor if drafts else layer.builder.non_spec_state_indices_tensor
        assert group.slots.data_ptr() == owner.data_ptr()
        offsets = group.rows.sequences["cu_seqlens"]
        assert offsets.tolist() == [0, 1 + drafts] + [2 + 2 * drafts] * 4
        if kind != "k3" or drafts:
            owner = layer.builder.spec_query_start_loc if drafts else layer.builder.non_spec_query_start_loc
            assert offsets.data_ptr() == owner.data_ptr()
        if drafts:
            assert group.accepted.data_ptr() == layer.builder.num_accepted_tokens.data_ptr()
            assert group.accepted.tolist() == [1] * 5


@pytest.mark.parametrize("drafts", [0, 3])
def test_M28_a_captured_step_follows_the_tables(kind, drafts, monkeypatch):
    """Without a GPU: the captured call is repeated with the very metadata it was captured with."""
    if kind == "k3":
        monkeypatch.setattr("vllm.models.kimi_k3.nvidia.kda_metadata.stage_spec_decode_metadata", staged)

    def capture(run):
        run()
        return run

    vllm_steps.check_replays(kind, drafts, capture)


def test_another_cache_groups_metadata_has_its_own_slots():
    layer = Layer("glm", engine_config(drafts=2))
    a, b = Request(1, 90, slots=[1, 2, 3], prompt=70), Request(2, 90, slots=[4, 5, 6])
    layer.step([(a, 70, 0)])
    common, m = layer.metadata([(a, 3, 0), (b, 30, 0)])
    moved = layer.builder.update_block_table(m, common.block_table_tensor + 10, common.slot_mapping)
    assert moved.libkda.spec.slots.tolist() == [[11, 12, 13]] and moved.libkda.prefill.slots.tolist() == [14]
    assert m.libkda.spec.slots.tolist() == [[1, 2, 3]]
    assert moved.libkda.spec.rows is m.libkda.spec.rows


def test_M14_chunk_tables_are_vllms():
    from libkda.vllm._metadata import chunk_tables

    lengths = torch.tensor([1, 63, 64, 65, 130, 200, 0, 0, 0])  # padding last, as vLLM has it
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    indices, offsets = chunk_tables(starts, starts, 600, 8)
    want = [[n, c] for n, length in enumerate(lengths.tolist()) for c in range(-(-length // 64))]
    assert indices.tolist() == want and indices.dtype == starts.dtype
    assert offsets.tolist() == [0, *(-(-lengths // 64)).cumsum(0).tolist()]


def test_I09_checkpoints_are_declared_and_written(kind):
    """Align mode: state and window at a block boundary inside a prefill go to the block that vLLM names, in the same pass."""
    config = engine_config(cache_mode="align")
    config.cache_config.mamba_block_size = config.cache_config.hash_block_size = 16
    config.cache_config.cache_hit_alignment_tokens = 16
    layer = Layer(kind, config)
    assert (layer.spec.num_prefill_checkpoint_blocks, layer.spec.prefill_checkpoint_alignment) == (1, 16)
    a = Request(1, 100, slots=[1])
    a.blocks = [7, 8, 9, 1]  # of 16 tokens each; the third is the checkpoint's, the last the running state's
    layer.builder.mamba_aligned_state_indices = torch.tensor([[1]], dtype=torch.int32)
    common, _ = layer.metadata([(a, 50, 0)])
    common.block_table_tensor = torch.tensor([a.blocks], dtype=torch.int32)
    layer.metadata = lambda *_: (common, layer.builder.build(0, common))
    assert layer.metadata()[1].libkda.prefill.checkpoint_offsets.tolist() == [[48]]
    layer.step([(a, 50, 0)])
    conv, state = layer.layer.kv_cache
    assert error(state[9], reference(layer, a, 48)[1]) <= 1e-5
    assert error(state[1], reference(layer, a, 50)[1]) <= 1e-5
    assert torch.equal(conv[9, :3], a.rows[45:48, : 3 * vllm_steps.CHANNELS])
    off = Layer(kind, engine_config(libkda={"checkpoint": False}), prefix="model.layers.1.attn")
    assert off.spec.num_prefill_checkpoint_blocks == 0


def test_workspace_is_vllms_and_does_not_grow_once_locked(kind, monkeypatch):
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    asked = []
    get = workspace.WorkspaceManager.get_simultaneous
    monkeypatch.setattr(workspace.WorkspaceManager, "get_simultaneous", lambda s, *w: asked.append(w) or get(s, *w))
    layer = Layer(kind, engine_config(max_tokens=256))
    assert asked
    workspace.current_workspace_manager().lock()
    a, b = Request(1, 256, slots=[1], prompt=250), Request(2, 300, slots=[2])
    layer.step([(a, 250, 0)])
    layer.step([(a, 1, 0), (b, 255, 0)])
    assert error(layer.state(b), reference(layer, b, 255)[1]) <= 1e-5
    with pytest.raises((ValueError, RuntimeError), match="max_tokens|256"):
        layer.step([(Request(3, 300, slots=[3]), 300, 0)])


def test_F29_no_plan_is_made_while_serving(kind):
    from libkda.torch._load import OPERATORS

    for drafts in (0, 2):
        layer = Layer(kind, engine_config(dtype=torch.bfloat16, drafts=drafts, max_tokens=640), prefix=f"layers.{drafts}.attn")
        a = Request(1, 400, torch.bfloat16, slots=[1, 2, 3][: 1 + drafts], prompt=300)
        b = Request(2, 300, torch.bfloat16, slots=[4, 5, 6][: 1 + drafts])
        before = OPERATORS.libkda_torch_plans()
        layer.step([(a, 1, 0)])
        layer.step([(a, 299, 0), (b, 100, 0)])
        layer.step([(a, 1 + drafts, 0), (b, 200, 0)], pad_requests=2)
        layer.step([(a, 1, 0)], pad_requests=7)
        assert OPERATORS.libkda_torch_plans() == before


def test_a_norm_weight_loaded_later_is_seen():
    for kind in ("k3", "kimi_linear"):
        layer = Layer(kind, engine_config(dtype=torch.bfloat16))
        weight = layer.layer.o_norm.weight
        weight.weight_loader(weight, torch.full_like(weight, 2.5))
        assert layer.layer.libkda_norm_weight.dtype == torch.float32
        assert (layer.layer.libkda_norm_weight == 2.5).all() and (weight == 2.5).all()
        assert "libkda_norm_weight" not in layer.layer.state_dict()


def test_the_whole_forward(kind):
    """Projections included: chunked prefill and decode steps through forward give the one-shot result."""
    from vllm.forward_context import set_forward_context

    layer = Layer(kind, engine_config())
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(70, vllm_steps.HIDDEN, generator=generator)

    def run(slot, cuts):
        request, out = Request(9, 70, slots=[slot], prompt=68), []
        for tokens in cuts:
            _, metadata = layer.metadata([(request, tokens, 0)])
            begin = request.computed
            with set_forward_context({layer.prefix: metadata}, layer.config), torch.inference_mode():
                out.append(layer.layer(hidden_states=hidden[begin : begin + tokens], positions=torch.arange(tokens)))
            request.computed += tokens
        return torch.cat(out)

    if kind == "glm":  # its norm after the mixer is a Triton kernel; vLLM's own PyTorch form of it serves here
        layer.layer.o_norm.forward = lambda x, g: layer.layer.o_norm.forward_native(x, g)
    for part in layer.layer.modules():  # what the CPU platform does after loading, without its repacking
        part.cpu_linear = torch.nn.functional.linear
    once = run(1, [70])
    assert error(run(2, [64, 4, 1, 1]), once.double()) <= 1e-5 and once.abs().max() > 0
