"""Contract sections 3 and 4 for the Triton kernels: one softmax over records, windows and new tokens, in both seal orders."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import ATTENTION_TOLERANCE, assert_close, poisoned_state, random_tokens
from twin import Twin, launch_append, launch_attention

from kivi_ops import KiviConfig, KiviState, cpu
from kivi_ops.kernels import launch

SMALL = KiviConfig(group_size=4, residual_length=8)
ORDERS = ["after_attention", "before_attention"]


@pytest.mark.parametrize("seal", ORDERS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_a_history_of_steps(seal: str, causal: bool, device: str) -> None:
    """Prefill, decode, chunks and a rollback, rows padded and poisoned: each output is the reference's."""
    config = KiviConfig(group_size=4, residual_length=8, seal=seal)
    twin = Twin(device, config, 48, heads=1 if causal else 2, repeats=2, left_padding=[0, 5], capacity=64)
    for start, count in ((0, 3), (3, 17), (20, 1), (21, 1), (22, 11), (27, 2), (29, 1), (30, 18)):
        output = twin.step(start, count, is_causal=causal)
        assert output.is_contiguous() and output.dtype == torch.float32
    twin.check(48)


FORMATS = {  # key bits, value bits, G, R, D_k, D_v, dtype, metadata, repeats
    "2x2-G32-D128-fp16-gqa4": (2, 2, 32, 32, 128, 128, torch.float16, None, 4),
    "2x2-G32-D64-bf16-gqa3": (2, 2, 32, 64, 64, 64, torch.bfloat16, None, 3),
    "2x4-G8-D80x33-fp32-gqa1": (2, 4, 8, 16, 80, 33, torch.float32, None, 1),
    "8x2-G16-D100x96-fp16-gqa8": (8, 2, 16, 32, 100, 96, torch.float16, torch.float32, 8),
    "4x8-G32-D33x100-bf16-gqa2": (4, 8, 32, 32, 33, 100, torch.bfloat16, torch.float16, 2),
    "4x4-G64-D112x256-fp32-gqa1": (4, 4, 64, 64, 112, 256, torch.float32, torch.bfloat16, 1),
    "8x8-G2-D1x2-fp32-gqa20": (8, 8, 2, 6, 1, 2, torch.float32, None, 20),
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("seal", ORDERS)
def test_every_format(format: tuple, seal: str, device: str) -> None:
    key_bits, value_bits, group, residual, key_dim, value_dim, dtype, metadata, repeats = format
    config = KiviConfig(key_bits, value_bits, group, residual, seal, metadata_dtype=metadata)
    tokens = 2 * residual + 9
    twin = Twin(device, config, tokens, repeats=repeats, key_dim=key_dim, value_dim=value_dim, dtype=dtype, left_padding=[3])
    start = 0
    for count in (residual + 5, 1, residual, 3):
        twin.step(start, count, is_causal=True)
        start += count


def masks(rows: int, heads: int, new_tokens: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    full = torch.rand(rows, heads, new_tokens, columns, generator=generator)
    return {
        "bool": full < 0.6,
        "bool_per_row": full[:, :1, :1] < 0.6,
        "bool_one_column": full[..., :1] < 0.6,
        "bool_transposed": (full < 0.6).transpose(2, 3).contiguous().transpose(2, 3),
        "bool_expanded": (full[:1, :1] < 0.6).expand(rows, heads, new_tokens, columns),
        "bool_narrow": full[..., :20] < 0.6,
        "float": 3 * full - 1,
        "float_per_head": (3 * full - 1)[:1, :, :1],
        "float_one_column": full[..., :1],
        "float_hides": torch.where(full < 0.6, 0.0, -torch.inf),
        "float64": full.double(),
        "float_lowest_hides": torch.where(full < 0.6, 0.0, torch.finfo(torch.float32).min),
    }


@pytest.mark.parametrize("kind", masks(1, 1, 1, 1))
def test_masks(kind: str, device: str) -> None:
    twin = Twin(device, SMALL, 31, heads=2, repeats=2, left_padding=[0, 3], capacity=40)
    twin.append(0, 26)
    twin.step(26, 5, attn_mask=masks(2, 4, 5, 40)[kind])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masks_of_the_cache_dtype(dtype: torch.dtype, device: str) -> None:
    twin = Twin(device, SMALL, 31, repeats=2, dtype=dtype, capacity=40)
    twin.append(0, 26)
    twin.step(26, 5, attn_mask=masks(1, 2, 5, 40)["float"].to(dtype))


def test_what_a_mask_hides_everywhere_gives_zero(device: str) -> None:
    twin = Twin(device, SMALL, 30, left_padding=[0, 20], capacity=32)
    mask = torch.zeros(2, 1, 3, 32, dtype=torch.bool)
    mask[0, 0, 1] = True
    twin.append(0, 27)
    output = twin.step(27, 3, attn_mask=mask)
    assert torch.equal(output[0, 0, [0, 2]], torch.zeros_like(output[0, 0, [0, 2]])) and not output[1].any()
    assert output[0, 0, 1].all()


def test_queries_of_pads_give_zero(device: str) -> None:
    twin = Twin(device, SMALL, 12, left_padding=[4, 12])
    twin.query[0, :, :4] = float("nan")
    twin.query[1] = 1.0
    twin.query[0, :, :4] = 1.0
    output = twin.step(0, 12, is_causal=True)
    assert not output[0, :, :4].any() and not output[1].any() and output[0, :, 4:].all()


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.05, None), (None, 30.0), (None, 0.7), (-0.5, 5.0)], ids=str)
def test_scale_and_softcap(scale: float | None, softcap: float | None, device: str) -> None:
    twin = Twin(device, SMALL, 24, repeats=2)
    twin.append(0, 21)
    mask = masks(1, 2, 3, 24)["float_hides"]
    twin.step(21, 3, attn_mask=mask, scale=scale, softcap=softcap)


def test_splits_share_one_normalisation(device: str) -> None:
    """Rows of 600, 130 and 2 tokens in a cache of 2048, whose grid has 8 splits: some full, some empty, one row all in one."""
    config = KiviConfig(group_size=32, residual_length=64)
    twin = Twin(device, config, 600, repeats=2, left_padding=[0, 470, 598], capacity=2048)
    twin.query *= 3
    twin.append(0, 599)
    twin.step(599, 1, is_causal=True)


def test_a_long_first_prefill(device: str) -> None:
    """More query rows than one block has, more tokens than a split."""
    twin = Twin(device, KiviConfig(group_size=32, residual_length=32), 150, repeats=2, left_padding=[0, 7], capacity=512)
    twin.step(0, 130, is_causal=True)
    twin.step(130, 20, is_causal=True)


def test_worked_example_with_different_splits(device: str) -> None:
    """Contract section 4: eight logits of 0 and one of ln 9, Key split 8 + 1, Value split 4 + 5: 117 / 17."""
    config = KiviConfig(group_size=2, residual_length=4)
    state = poisoned_state(config, 1, 1, 16, 2, 2, torch.float32, device=device)
    key, value = torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2)
    key[..., 8, 0], value[..., 0] = math.log(9), torch.arange(1.0, 10.0)
    query = torch.tensor([[[[1.0, 0.0]]]], device=device)
    key, value = key.to(device), value.to(device)
    launch_append(state, key[:, :, :8], value[:, :, :8], torch.tensor(0, device=device))
    assert state.sealed.tolist() == [[8, 4]]
    output = launch_attention(state, query, key[:, :, 8:], value[:, :, 8:], torch.tensor(8, device=device), scale=1.0)
    assert output[0, 0, 0, 0].item() == pytest.approx(117 / 17, rel=1e-6)


@pytest.mark.parametrize("where", ["record", "window", "fresh"])
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_tokens_show(bad: float, role: str, where: str, device: str) -> None:
    twin = Twin(device, SMALL, 24, repeats=2, left_padding=[0, 0])
    getattr(twin, role)[0, 0, {"record": 3, "window": 22, "fresh": 23}[where], 5] = bad
    twin.append(0, 23)
    query, key, value = (x.to(device) for x in twin.new(23, 1))
    output = launch_attention(twin.state, query, key, value, torch.tensor(23, device=device)).cpu()
    assert output[1].isfinite().all()
    if role == "key":
        # An infinite Key may also be seen with a weight of exactly 0 or 1, where its query has the right sign; in records it is NaN.
        assert output[0].isnan().all() or (bad == float("inf") and where != "record")
    else:
        group = output[0, :, 0, 4:8] if where == "record" else output[0, :, 0, 5]
        assert not group.isfinite().any()


def test_past_the_capacity_is_nan_in_that_row_alone(device: str) -> None:
    twin = Twin(device, SMALL, 40, repeats=2, left_padding=[0, 3], capacity=24)
    twin.append(0, 20)
    query, key, value = (x.to(device) for x in twin.new(20, 4))
    for starts, lost in (([21, 20], [True, False]), ([20, 40], [False, True]), ([2**33, 24], [True, True])):
        position = torch.tensor(starts, device=device)[:, None]
        for causal in (True, False):
            output = launch_attention(twin.state, query, key, value, position, is_causal=causal)
            assert [row.isnan().all().item() for row in output] == lost
            assert [row.isnan().any().item() for row in output] == lost


@pytest.mark.parametrize("seal", ORDERS)
def test_rows_at_positions_of_their_own(seal: str, device: str) -> None:
    """One row decodes, one is rolled back into its records, one starts over: its state counts as empty, so it sees exact floats."""
    config = KiviConfig(group_size=4, residual_length=8, seal=seal)
    twin = Twin(device, config, 40, left_padding=[0, 2, 0])
    twin.append(0, 30)
    starts = [30, 11, 0]
    query, key, value = twin.new(30, 9)
    expected = twin.reference.attend(query, key, value, starts, is_causal=True)
    position = torch.tensor(starts, dtype=torch.int32, device=device)[:, None]
    query, key, value = (x.to(device) for x in (query, key, value))
    if seal == "before_attention":
        launch_append(twin.state, key, value, position)
    output = launch_attention(twin.state, query, key, value, position, is_causal=True)
    assert_close("attention", output, expected, ATTENTION_TOLERANCE[torch.float32])


def test_strided_and_expanded_arguments(device: str) -> None:
    twin = Twin(device, SMALL, 40, heads=2, left_padding=[0, 2])
    twin.append(0, 20)
    fused = random_tokens(2, 4, 12, 32, seed=5, device=device) - 5  # [B, S, heads, D]
    wide = random_tokens(2, 4, 8, 64, seed=6, device=device) - 5
    position = torch.full((2, 4), 20, device=device)[:, ::2].T.contiguous().T[:, :1]
    for query, key, value in (
        (fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2), fused[:, :, 6:8].transpose(1, 2)),
        (wide[:, :, ::2, ::2], wide[:, :1, :4, 32:].expand(-1, 2, -1, -1), wide[:1, :2, 1::2, :32].expand(2, -1, -1, -1)),
    ):
        output = launch_attention(twin.state, query, key, value, position, is_causal=True)
        plain = (x.contiguous() for x in (query, key, value))
        assert output.is_contiguous()
        assert torch.equal(output, launch_attention(twin.state, *plain, torch.tensor(20, device=device), is_causal=True))


def test_own_error_before_rounding(device: str) -> None:
    """fp16 inputs, output kept in float32 by equal arithmetic on a float32 state with fp16 grids: 1e-5, below the 1e-4 that is allowed."""
    config = KiviConfig(group_size=32, residual_length=32, metadata_dtype=torch.float16)
    twin = Twin(device, config, 200, repeats=4, key_dim=128, capacity=512)
    for x in (twin.key, twin.value, twin.query):
        x.copy_(x.half().float())
    twin.append(0, 199)
    twin.step(199, 1)


def test_nothing_is_changed(device: str) -> None:
    twin = Twin(device, SMALL, 24)
    twin.append(0, 20)
    before = {name: tensor.clone() for name, tensor in twin.state.tensors().items()}
    launch_attention(twin.state, *(x.to(device) for x in twin.new(20, 4)), torch.tensor(20, device=device))
    for name, tensor in twin.state.tensors().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seal", ORDERS)
def test_a_captured_step_replays_at_any_length(seal: str) -> None:
    """Attention, append and update in one CUDA graph, replayed while the position moves on the device, against eager launches."""
    config = KiviConfig(seal=seal)
    tokens, capacity, dtype = 400, 1024, torch.float16
    key, value = (random_tokens(2, 2, tokens, 128, dtype, seed, "cuda") for seed in (0, 1))
    query = random_tokens(2, 8, tokens, 128, dtype, 2, "cuda") - 5
    states = [poisoned_state(config, 2, 2, capacity, 128, 128, dtype, [0, 9], "cuda") for _ in range(2)]
    new = [x[:, :, :1].clone() for x in (query, key, value)]
    position = torch.zeros((), dtype=torch.int64, device="cuda")

    def step(state: KiviState, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if seal == "before_attention":
            launch_append(state, key, value, position)
        output = launch_attention(state, query, key, value, position, is_causal=True)
        if seal == "after_attention":
            launch_append(state, key, value, position)
        return output

    step(states[0], *new, position)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(states[0], *new, position)
    for start in range(tokens):
        columns = slice(start, start + 1)
        for buffer, x in zip(new, (query, key, value), strict=True):
            buffer.copy_(x[:, :, columns])
        position.fill_(start)
        graph.replay()
        eager = step(states[1], *(x[:, :, columns] for x in (query, key, value)), torch.tensor(start, device="cuda"))
        assert torch.equal(captured, eager), start
    assert torch.equal(states[0].sealed, states[1].sealed) and states[0].length.item() == tokens


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_launches_go_to_the_device_of_the_tensors() -> None:
    assert torch.cuda.current_device() == 0
    Twin("cuda:1", SMALL, 24).step(0, 24, is_causal=True)


def test_cpu_and_kernels_agree_on_float32(device: str) -> None:
    """The two implementations of one operator, over the same state."""
    twin = Twin(device, SMALL, 30, heads=2, repeats=3, left_padding=[0, 4])
    twin.append(0, 25)
    read = [x.cpu() for x in twin.state.tensors().values()][:-1]
    format = {**SMALL.read_kwargs(30, torch.float32), "seal": "after_attention"}
    new = twin.new(25, 5)
    expected = cpu.attention(*new, *read, torch.tensor(25), None, True, 0.2, 4.0, **format)
    moved = (x.to(device) for x in (*new, *read, torch.tensor(25)))
    assert_close("attention", launch.attention(*moved, None, True, 0.2, 4.0, **format), expected, 1e-5)
