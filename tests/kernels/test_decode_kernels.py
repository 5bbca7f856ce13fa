"""The kernels for decode steps of common shapes, against the float64 reference: contract sections 3, 4 and 7."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import ATTENTION_TOLERANCE, assert_close
from twin import Twin, launch_append

from kivi_ops import KiviConfig
from kivi_ops.kernels import launch
from kivi_ops.kernels.layout import record_layouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="Gluon has no interpreter; of the portable kernel test_portable_kernels.py has tests that do"
    ),
]
FORMATS = {  # key bits, value bits, D, dtype, repeats
    "2x2-D128-fp16-gqa4": (2, 2, 128, torch.float16, 4),
    "2x2-D128-bf16-gqa4": (2, 2, 128, torch.bfloat16, 4),
    "2x2-D128-fp16-gqa8": (2, 2, 128, torch.float16, 8),
    "2x2-D128-bf16-gqa8": (2, 2, 128, torch.bfloat16, 8),
    "2x2-D64-fp16-gqa1": (2, 2, 64, torch.float16, 1),
    "2x2-D64-bf16-gqa7": (2, 2, 64, torch.bfloat16, 7),
    "4x4-D128-fp16-gqa3": (4, 4, 128, torch.float16, 3),
    "4x4-D64-bf16-gqa16": (4, 4, 64, torch.bfloat16, 16),
    "4x2-D128-fp16-gqa2": (4, 2, 128, torch.float16, 2),
    "4x2-D64-fp16-gqa5": (4, 2, 64, torch.float16, 5),
    "2x4-D128-bf16-gqa4": (2, 4, 128, torch.bfloat16, 4),
    "2x4-D64-fp16-gqa12": (2, 4, 64, torch.float16, 12),
}


@pytest.fixture(params=["gluon", "portable"])
def twin_of(request: pytest.FixtureRequest) -> Callable[..., Twin]:
    """A state and its reference whose attention is one kernel's."""

    def make(format: tuple, tokens: int, seal: str = "after_attention", residual: int = 64, margin: int = 0, **arguments: object) -> Twin:
        key_bits, value_bits, dim, dtype, repeats = format
        config = KiviConfig(key_bits, value_bits, 32, residual, seal, margin)
        return Twin("cuda", config, tokens, repeats=repeats, key_dim=dim, dtype=dtype, kernel=request.param, **arguments)

    return make


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("seal", ["after_attention", "before_attention"])
def test_a_history_of_steps(twin_of: Callable[..., Twin], format: tuple, seal: str) -> None:
    """Decode after prefill over seals of both sides, several new tokens, rollbacks into sealed groups; rows padded and poisoned."""
    twin = twin_of(format, 700, seal, heads=2, left_padding=[0, 37, 690], capacity=1024)
    twin.append(0, 500)
    start = 500
    for count in (1, 1, 8, 3, 1, 5, 1):
        twin.step(start, count, is_causal=True)
        start += count
    for position, count in ((410, 1), (411, 4), (415, 1), (333, 2), (335, 1)):  # boundaries stay where the rollback put them
        twin.step(position, count)
    twin.append(336, 340)
    for position in range(676, 700, 3):
        twin.step(position, 3, is_causal=True)
    twin.check(700)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_short_rows(twin_of: Callable[..., Twin], format: tuple) -> None:
    """From the first token on: nothing sealed, then the first groups."""
    twin = twin_of(format, 150, left_padding=[0, 3], capacity=160, residual=32)
    for position in range(150):
        if position < 5 or position % 7 == 0 or 60 < position < 70:
            twin.step(position, 1)
        else:
            twin.append(position, 1)


@pytest.mark.parametrize("kind", ["bool", "bool_shared", "bool_mostly", "float", "float_shared", "float_mostly", "narrow", "one_column"])
@pytest.mark.parametrize("name", ["2x2-D128-fp16-gqa4", "2x2-D64-bf16-gqa7", "4x2-D128-fp16-gqa2"])
def test_masks(twin_of: Callable[..., Twin], name: str, kind: str) -> None:
    format = FORMATS[name]
    twin = twin_of(format, 704, heads=2, left_padding=[0, 300], capacity=800)
    full = torch.rand(2, 2 * format[4], 4, 800, generator=torch.Generator().manual_seed(3))
    mostly = torch.ones(1, 1, 1, 800, dtype=torch.bool)
    mostly[..., [5, 140, 333, 420, 699]] = False
    mask = {
        "bool_mostly": mostly,
        "float_mostly": torch.where(mostly, 0.0, -2.5).to(format[3]),
        "bool": full < 0.6,
        "bool_shared": full[:, :1, :1] < 0.6,
        "float": (3 * full - 1).to(format[3]),
        "float_shared": torch.where(full[:1, :1, :1] < 0.6, 0.0, -torch.inf),
        "narrow": full[..., :650] < 0.6,
        "one_column": full[..., :1] < 0.6,
    }[kind]
    twin.append(0, 700)
    twin.step(700, 4, attn_mask=mask)


def test_what_a_mask_hides_everywhere_gives_zero(twin_of: Callable[..., Twin]) -> None:
    twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 602, capacity=640)
    mask = torch.zeros(1, 1, 2, 640, dtype=torch.bool)
    mask[0, 0, 1, 20:300] = True
    twin.append(0, 600)
    output = twin.step(600, 2, attn_mask=mask)
    assert not output[0, :, 0].any() and output[0, :, 1].all()


@pytest.mark.parametrize("margin", [0, 40])
@pytest.mark.parametrize("residual", [32, 128, 256])
def test_windows_of_other_lengths(twin_of: Callable[..., Twin], residual: int, margin: int) -> None:
    twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 900, residual=residual, margin=margin, capacity=960)
    twin.append(0, 797)
    for position in (797, 798, 801, 790):
        twin.append(position, 3)
        twin.step(position + 3, 2, is_causal=True)


@pytest.mark.parametrize("name", ["2x2-D128-fp16-gqa4", "2x2-D128-fp16-gqa8", "2x2-D128-bf16-gqa4", "4x4-D64-bf16-gqa16"])
def test_long_rows_of_zero_mean(twin_of: Callable[..., Twin], name: str) -> None:
    """Values of zero mean over thousands of tokens: rounding and truncation do not average away, and logits are large."""
    twin = twin_of(FORMATS[name], 12001, residual=128, capacity=12100)
    for x in (twin.key, twin.value, twin.query):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[1])))
    twin.query *= 3
    twin.append(0, 12000)
    twin.step(12000, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_extreme_scales(twin_of: Callable[..., Twin], dtype: torch.dtype) -> None:
    """Rows of Values and channels of Keys that fill float16 or go far beyond it, among others near its smallest numbers."""
    key_size, value_size, small = (30.0, 2e4, 1e-4) if dtype == torch.float16 else (30.0, 1e20, 1e-20)
    twin = twin_of((2, 2, 128, dtype, 4), 600, capacity=640)
    for x in (twin.key, twin.value, twin.query):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[1])))
    twin.key[..., 3] *= key_size
    twin.key[..., 77] *= small
    twin.value[:, :, 100:140] *= value_size
    twin.value[:, :, 300:340] *= small
    twin.append(0, 599)
    twin.step(599, 1)


def test_a_broken_group_is_seen_and_no_other(twin_of: Callable[..., Twin]) -> None:
    """NaN in a Key group or a Value token reaches the queries that see it (contract section 1), and garbage elsewhere nobody."""
    for side in ("key", "value"):
        twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 601, heads=2, capacity=640)
        getattr(twin, side)[0, 1, 130, 5] = float("inf")
        twin.append(0, 600)
        query, key, value = (x.cuda() for x in twin.new(600, 1))
        output = twin.attend(query, key, value, torch.tensor(600, device="cuda"))
        assert output[0, :4].isfinite().all()
        assert output[0, 4:].isnan().all() if side == "key" else output[0, 4:, :, :32].isnan().all()
        hidden = torch.ones(1, 1, 1, 640, dtype=torch.bool, device="cuda")
        hidden[..., 128:160] = False
        masked = twin.attend(query, key, value, torch.tensor(600, device="cuda"), hidden)
        assert masked[0, :4].isfinite().all()
        if side == "key":  # hidden tokens do not count, whatever their Keys are
            assert masked.isfinite().all()


def test_rows_past_the_capacity_are_nan_and_alone(twin_of: Callable[..., Twin]) -> None:
    twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 256, left_padding=[0, 10], capacity=256)
    twin.append(0, 255)
    query, key, value = (x.cuda() for x in twin.new(254, 2))
    position = torch.tensor([[255], [100]], device="cuda")
    output = twin.attend(query, key, value, position)
    assert output[0].isnan().all() and output[1].isfinite().all()


def test_many_heads_and_expanded_inputs(twin_of: Callable[..., Twin]) -> None:
    twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 400, heads=8, left_padding=[0] * 9, capacity=512)
    twin.append(0, 399)
    query, key, value = (x.cuda() for x in twin.new(399, 1))
    expected = twin.attend(query, key, value, torch.tensor(399, device="cuda"))
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.cat([key, key], -1)[..., 128:]
    assert torch.equal(twin.attend(transposed, shifted, value, torch.tensor([399], device="cuda")), expected)
    reference = twin.reference.attend(*twin.new(399, 1), 399)
    assert_close("attention", expected, reference, ATTENTION_TOLERANCE[torch.float16])


@pytest.mark.parametrize("rows", [2, 7, 40])
def test_rows_of_very_different_lengths(twin_of: Callable[..., Twin], rows: int) -> None:
    """Programs are dealt to rows by their lengths, rows of nothing but pads among them."""
    padding = [0, 2000, 600, 1500, 1990, 37, 1023, *(50 * row for row in range(33))][:rows]
    twin = twin_of(FORMATS["2x2-D128-fp16-gqa4"], 2003, heads=2, left_padding=padding, capacity=2048)
    twin.append(0, 2000)
    twin.step(2000, 1)
    twin.step(2001, 2, is_causal=True)
    positions = torch.tensor([[2003 - 11 * row] for row in range(rows)], device="cuda")  # each row elsewhere
    query, key, value = (x.cuda() for x in twin.new(2002, 1))
    output = twin.attend(query, key, value, positions)
    expected = twin.reference.attend(*twin.new(2002, 1), positions.flatten().tolist())
    assert_close("attention", output, expected, ATTENTION_TOLERANCE[torch.float16])


def test_a_captured_step_replays_at_any_length(twin_of: Callable[..., Twin]) -> None:
    twin = twin_of(FORMATS["2x2-D128-bf16-gqa4"], 500, capacity=512)
    query, key, value = (x.cuda() for x in twin.new(300, 1))
    position = torch.tensor(300, device="cuda")
    twin.append(0, 300)
    twin.attend(query, key, value, position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = twin.attend(query, key, value, position)
    for start in (300, 301, 400, 455):
        if start > 301:
            done = int(twin.state.length)
            twin.append(done, start - done)
        for target, source in zip((query, key, value), twin.new(start, 1), strict=True):
            target.copy_(source)
        position.fill_(start)
        graph.replay()
        expected = twin.reference.attend(*twin.new(start, 1), start)
        assert_close(f"replayed at {start}", output, expected, ATTENTION_TOLERANCE[torch.bfloat16])
        launch_append(twin.state, key, value, position)
        twin.reference.append(*twin.new(start, 1)[1:], start)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_decode_steps_are_the_gluon_kernels(format: tuple) -> None:
    """Those whose channels are not adjacent are the portable kernel's, calls of many query rows the prefill kernel's."""
    key_bits, value_bits, dim, dtype, repeats = format
    layouts = record_layouts(dim, dim, key_bits, value_bits, 32, dtype)

    def chosen(new_tokens: int, dtype: torch.dtype = dtype, transposed: bool = False, softcap: float | None = None) -> str:
        query, key = (torch.empty(1, heads, new_tokens, dim, dtype=dtype, device="cuda") for heads in (repeats, 1))
        return launch._chosen(query.mT.contiguous().mT if transposed else query, key, key, layouts, softcap)

    assert chosen(1) == chosen(4) == "gluon"
    assert chosen(4, transposed=True) == "portable"
    assert chosen(200) == "prefill"
    assert chosen(1, softcap=30.0) == chosen(1, torch.float32) == "general"
