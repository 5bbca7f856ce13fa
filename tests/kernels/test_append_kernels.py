"""Contract section 3 for the Triton kernels: which tokens are sealed when, bit-equal to the reference whatever the cut of a history."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from helpers import assert_same_rows, bits_of, poisoned_state, random_tokens, reference_rows, valid_rows
from twin import Twin, launch_append, tokens_held

from kivi_ops import KiviConfig, KiviState, cpu
from kivi_ops.kernels import launch

SMALL = KiviConfig(group_size=4, residual_length=8)


def cut(tokens: int, sizes: list[int]) -> list[tuple[int, int]]:
    """(start, count) of each call when ``tokens`` columns come in calls of ``sizes``, in turn."""
    calls, start = [], 0
    for size in itertools.cycle(sizes):
        if start >= tokens:
            return calls
        calls.append((start, min(size, tokens - start)))
        start += size
    raise AssertionError


@pytest.mark.parametrize(
    ("sizes", "margin"),
    [([44], 0), ([1], 0), ([7], 0), ([33], 0), ([1, 7, 33], 0), ([1, 7, 33], 3)],
    ids=["whole", "1", "7", "33", "1-7-33", "1-7-33-margin3"],
)
def test_any_chunking_gives_the_same_state(sizes: list[int], margin: int, device: str) -> None:
    tokens = 27 if sizes == [1] else 44
    twin = Twin(device, KiviConfig(group_size=4, residual_length=8, rollback_margin=margin), tokens, left_padding=[0, 5], capacity=64)
    for start, count in cut(tokens, sizes):
        twin.append(start, count)
        if start + count in (1, 7, 8, 9, 24, 27, 33, 40, 44):
            twin.check(start + count)


FORMATS = {  # key bits, value bits, G, R, D_k, D_v, dtype, metadata
    "2x2-G32-D128-fp16": (2, 2, 32, 32, 128, 128, torch.float16, None),
    "2x2-G32-D64-bf16": (2, 2, 32, 64, 64, 64, torch.bfloat16, None),
    "2x4-G8-D80x33-fp32": (2, 4, 8, 16, 80, 33, torch.float32, None),
    "8x2-G16-D100x96-fp16": (8, 2, 16, 32, 100, 96, torch.float16, torch.float32),
    "4x8-G32-D33x100-bf16": (4, 8, 32, 32, 33, 100, torch.bfloat16, torch.float16),
    "4x4-G64-D112x256-fp32": (4, 4, 64, 64, 112, 256, torch.float32, torch.bfloat16),
    "8x8-G2-D1x2-fp32": (8, 8, 2, 6, 1, 2, torch.float32, None),
    "2x8-G8-D70x72-fp16": (2, 8, 8, 16, 70, 72, torch.float16, None),
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_format(format: tuple, device: str) -> None:
    key_bits, value_bits, group, residual, key_dim, value_dim, dtype, metadata = format
    config = KiviConfig(key_bits, value_bits, group, residual, metadata_dtype=metadata)
    tokens = 2 * residual + 9
    twin = Twin(device, config, tokens, heads=2, key_dim=key_dim, value_dim=value_dim, dtype=dtype, left_padding=[3])
    for start, count in cut(tokens, [residual + 3, 1, 1, residual]):
        twin.append(start, count)
    twin.check(tokens)


def test_a_padded_row_is_the_row_alone(device: str) -> None:
    padding, tokens = [0, 3, 17, 40], 40
    together = Twin(device, SMALL, tokens, left_padding=padding)
    for start, count in cut(tokens, [5, 11]):
        together.append(start, count)
    together.check(tokens)
    rows = valid_rows(together.state, tokens_held(together.state, tokens))
    for b, pads in enumerate(padding[:-1]):
        alone = poisoned_state(SMALL, 1, 1, tokens, 32, 32, torch.float32, device=device)
        key, value = (x[b : b + 1, :, pads:].to(device) for x in (together.key, together.value))
        launch_append(alone, key, value, torch.zeros(1, dtype=torch.int32, device=device))
        assert_same_rows(valid_rows(alone, [tokens - pads]), [rows[b]])
    assert rows[-1]["sealed"].tolist() == [0, 0]  # all pads so far


@pytest.mark.parametrize("back", [1, 6, 13, 22], ids=lambda n: f"to{n}")
def test_rollback_then_other_tokens(back: int, device: str) -> None:
    """To a boundary inside a group, twice: the group that holds it is quantised again, whole groups below stay."""
    twin = Twin(device, SMALL, 40, left_padding=[0, 2])
    twin.append(0, 31)
    for seed in (11, 12):
        before = valid_rows(twin.state, tokens_held(twin.state, back))
        twin.key[:, :, back:] = random_tokens(2, 1, 40 - back, 32, seed=seed)
        twin.append(back, 3)
        twin.check(back + 3)
        twin.append(back + 3, 14)
        twin.check(back + 17)
        after = valid_rows(twin.state, tokens_held(twin.state, back + 17))
        for old, new, padding in zip(before, after, (0, 2), strict=True):
            whole = min(max(0, back - padding), int(old["sealed"][0])) // 4 * 4
            assert torch.equal(new["key_codes"][:, :whole], old["key_codes"][:, :whole])


def test_rejected_drafts_within_the_margin_leave_no_trace(device: str) -> None:
    config = KiviConfig(group_size=4, residual_length=8, rollback_margin=4)
    twin, never = (Twin(device, config, 44) for _ in range(2))
    accepted = twin.key.clone(), twin.value.clone()
    start = 0
    while start < 30:
        wrong = random_tokens(1, 1, 4, 32, seed=start + 99)
        twin.key[:, :, start : start + 4], twin.value[:, :, start : start + 4] = wrong, wrong + 1
        twin.append(start, 4)  # a draft, of which none is accepted
        twin.key.copy_(accepted[0]), twin.value.copy_(accepted[1])
        twin.append(start, 3)
        never.append(start, 3)
        start += 3
    for one in (twin, never):
        one.append(start, 2)  # past every rejected token
    rows = [valid_rows(t.state, [start + 2]) for t in (twin, never)]
    assert_same_rows(*rows)


def test_position_forms(device: str) -> None:
    """Shared [], [1], [S] and per row [B, 1], [B, S], int32 or int64, with strides of their own."""
    key, value = (random_tokens(2, 1, 13, 32, seed=s, device=device) for s in (0, 1))
    reference = poisoned_state(SMALL, 2, 1, 40, 32, 32, torch.float32, [1, 2])
    states = []
    for form in ("scalar", "one", "many", "column", "grid", "spread", "int32"):
        state = poisoned_state(SMALL, 2, 1, 40, 32, 32, torch.float32, [1, 2], device)
        for start, count in ((0, 10), (10, 3)):
            grid = (start + torch.arange(count, device=device)).expand(2, -1)
            position = {
                "scalar": torch.tensor(start, device=device),
                "one": torch.tensor([start], device=device),
                "many": grid[0],
                "column": grid[:, :1],
                "grid": grid.contiguous(),
                "spread": grid.repeat_interleave(3, 0).T.contiguous().T[::3],
                "int32": grid.to(torch.int32),
            }[form]
            launch_append(state, key[:, :, start : start + count], value[:, :, start : start + count], position)
        states.append(state)
    for start, count in ((0, 10), (10, 3)):
        new = (x[:, :, start : start + count].cpu() for x in (key, value))
        cpu.append(*new, *reference.tensors().values(), torch.tensor(start), None, **SMALL.op_kwargs(40, torch.float32))
    for state in states:
        assert state.length.item() == 13
        assert_same_rows(valid_rows(state, [12, 11]), valid_rows(reference, [12, 11]))


def test_rows_at_positions_of_their_own(device: str) -> None:
    twin = Twin(device, SMALL, 40, left_padding=[0, 2, 0])
    twin.append(0, 21)
    starts = [21, 13, 3]
    _, key, value = twin.new(25, 9)
    position = torch.tensor(starts, device=device)[:, None]
    launch_append(twin.state, key.to(device), value.to(device), position)
    twin.reference.append(key, value, starts)
    assert_same_rows(valid_rows(twin.state, [30, 20, 12]), reference_rows(twin.reference))
    assert twin.state.length.item() == 30


@pytest.mark.parametrize("count", [0, 1, 13, 30])
def test_count_is_read_on_the_device(count: int, device: str) -> None:
    key, value = (random_tokens(2, 1, 30, 32, seed=s) for s in (0, 1))
    states = [poisoned_state(SMALL, 2, 1, 40, 32, 32, torch.float32, [0, 4], where) for where in (device, "cpu")]
    for start, n in ((0, 9), (9, count)):
        at, valid = torch.tensor([start]), torch.tensor(n, dtype=torch.int32)
        launch_append(states[0], key.to(device), value.to(device), at.to(device), valid.to(device))
        cpu.append(key, value, *states[1].tensors().values(), at, valid, **SMALL.op_kwargs(40, torch.float32))
    assert states[0].length.item() == 9 + count
    tokens = [9 + count, 5 + count]
    assert_same_rows(valid_rows(states[0], tokens), valid_rows(states[1], tokens))


def everything(state: KiviState) -> dict[str, torch.Tensor]:
    return {name: bits_of(tensor.cpu()).clone() for name, tensor in state.tensors().items()}


def test_past_the_capacity(device: str) -> None:
    """What does not fit is dropped, the neighbour row is untouched, the length goes on, and a rollback recovers."""
    key, value = (random_tokens(2, 2, 60, 32, seed=s) for s in (0, 1))
    states = [poisoned_state(SMALL, 2, 2, 30, 32, 32, torch.float32, [0, 3], where) for where in (device, "cpu")]
    for starts, count in (([0, 0], 22), ([22, 12], 15), ([37, 27], 1), ([31, 28], 2), ([25, 29], 1), ([26, 0], 3)):
        position = torch.tensor(starts)[:, None]
        new = key[:, :, :count] + starts[0], value[:, :, :count] - starts[0]
        launch_append(states[0], *(x.to(device) for x in new), position.to(device))
        cpu.append(*new, *states[1].tensors().values(), position, None, **SMALL.op_kwargs(30, torch.float32))
        assert states[0].length.item() == states[1].length.item() == max(starts) + count
        tokens = [max(0, min(start + count, 30) - padding) for start, padding in zip(starts, (0, 3), strict=True)]
        assert_same_rows(valid_rows(states[0], tokens), valid_rows(states[1], tokens))


def test_capacity_below_the_residual_length(device: str) -> None:
    twin = Twin(device, KiviConfig(group_size=4, residual_length=64), 40, capacity=20)
    assert twin.state.value_records.shape[2] == 0
    twin.append(0, 13)
    twin.append(13, 9)
    twin.check(22)


def test_nothing_else_is_written(device: str) -> None:
    """A step that seals one Value and no Key changes that token's fields and grids, its own window row, the boundaries and the length."""
    twin = Twin(device, SMALL, 40, heads=2)
    twin.append(0, 9)  # Value 0 is sealed
    before = everything(twin.state)
    twin.append(9, 1)  # and now Value 1
    after = everything(twin.state)
    assert torch.equal(before["key_records"], after["key_records"])
    layout = twin.state.value_layout
    parts = [layout.split(x["value_records"]) for x in (before, after)]
    codes = [layout.unpack(words) for words, _, _ in parts]  # [B, H, records, tokens, D]
    assert set((codes[0] != codes[1]).nonzero()[:, 3].tolist()) == {1}
    for old, new in zip(parts[0][1:], parts[1][1:], strict=True):  # [B, H, records, groups, tokens]
        assert set((bits_of(old) != bits_of(new)).nonzero()[:, 4].tolist()) == {1}
    for name in ("key_window", "value_window"):
        assert set((before[name] != after[name]).any(-1).nonzero()[:, 2].tolist()) == {9 % 8}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_tokens_show_in_their_groups(bad: float, device: str) -> None:
    twin = Twin(device, SMALL, 40)
    twin.key[0, 0, 5, 7] = twin.value[0, 0, 6, 9] = bad
    for start, count in cut(40, [3, 17]):
        twin.append(start, count)
    twin.check(40)
    row = valid_rows(twin.state, [40])[0]
    assert row["key_scale"].isnan().nonzero().tolist() == [[0, 1, 7]] and row["value_min"].isnan().nonzero().tolist() == [[0, 6, 2]]


def test_strided_and_expanded_tokens(device: str) -> None:
    fused = random_tokens(2, 12, 6, 32, device=device)  # [B, S, q k v heads, D]
    one = random_tokens(1, 1, 24, 32, seed=3, device=device)
    wide = random_tokens(2, 2, 24, 64, seed=4, device=device)
    for key, value in (
        (fused[:, :, 2:4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)),
        (one.expand(2, 2, -1, -1), wide[:, :, :, ::2]),
        (wide[:, :, ::2, 32:], one.expand(2, 2, -1, -1)[:, :, ::2].flip(2)),
    ):
        states = [poisoned_state(SMALL, 2, 2, 40, 32, 32, torch.float32, [0, 2], where) for where in (device, "cpu")]
        at, tokens = torch.tensor(0), [key.shape[2], key.shape[2] - 2]
        launch_append(states[0], key, value, at.to(device))
        cpu.append(key.cpu(), value.cpu(), *states[1].tensors().values(), at, None, **SMALL.op_kwargs(40, torch.float32))
        assert_same_rows(valid_rows(states[0], tokens), valid_rows(states[1], tokens))


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Interpreted programs run in an order of chance, each launch in another one."""
    if device == "cuda":
        pytest.skip("a GPU has an order of its own")
    from triton.runtime.interpreter import interpreter_builder

    choose, orders, set_grid_idx = random.Random(0), {}, interpreter_builder.set_grid_idx

    def elsewhere(x: int, y: int, z: int) -> None:
        _, height, depth = interpreter_builder.grid_dim
        programs = range(interpreter_builder.grid_dim[0] * height * depth)
        if x == y == z == 0:
            orders["now"] = choose.sample(programs, len(programs))
        program = orders["now"][(x * height + y) * depth + z]
        set_grid_idx(program // (height * depth), program // depth % height, program % depth)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", elsewhere)


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.usefixtures("any_order")
def test_programs_may_run_in_any_order(margin: int, device: str) -> None:
    """Steps and prompts, rollbacks into records and windows, several programs for a row's every boundary."""
    config = KiviConfig(group_size=32, residual_length=32, rollback_margin=margin)
    twin = Twin(device, config, 100, heads=2, left_padding=[0, 5])
    for start, count in ((0, 62), (62, 1), (63, 1), (64, 7), (71, 20), (91, 9), (64, 1), (65, 16), (81, 15), (96, 1), (95, 2)):
        twin.append(start, count)
        twin.check(start + count)


@pytest.mark.gpu
@pytest.mark.parametrize("margin", [0, 5])
def test_many_heads_over_many_steps(margin: int) -> None:
    """What the interpreter cannot show: 2,560 programs and more at once, on boundaries, rows and words that they share; against the CPU."""
    config, choose = KiviConfig(4, 2, rollback_margin=margin), random.Random(margin)
    rows, heads, capacity, dim, padding = 8, 64, 700, 64, [0, 1, 2, 3, 50, 100, 0, 0]
    states = [poisoned_state(config, rows, heads, capacity, dim, dim, torch.float16, padding, where) for where in ("cuda", "cpu")]
    key, value = (random_tokens(rows, heads, capacity, dim, torch.float16, seed) for seed in (0, 1))
    starts = [0] * rows
    for call in range(120):
        count = choose.choice([1, 1, 1, 1, 2, 5, 8, 16, 17, 60])
        count = min(count, capacity - max(starts))
        position = torch.tensor(starts)[:, None]
        new = [x[:, :, call : call + count].contiguous() for x in (key, value)]
        for state in states:
            where = state.sealed.device
            state.append(*(x.to(where) for x in new), position.to(where))
        ends = [start + count for start in starts]
        if call % 10 == 9:
            tokens = [max(0, end - pads) for end, pads in zip(ends, padding, strict=True)]
            assert_same_rows(*(valid_rows(state, tokens) for state in states))
        starts = [max(0, end - choose.choice([0, 0, 0, 1, 4])) if end < capacity - 60 else end // 2 for end in ends]


def test_a_boundary_without_room_for_the_count(device: str) -> None:
    """A capacity that needs the bits in which a step counts: two launches, and the same state."""
    states = [poisoned_state(SMALL, 1, 1, 40, 8, 8, torch.float32, device=device) for _ in range(2)]
    key, value = (random_tokens(1, 1, 24, 8, seed=s, device=device) for s in (0, 1))
    for start in range(0, 24, 3):
        new, at = (key[:, :, start : start + 3], value[:, :, start : start + 3]), torch.tensor(start, device=device)
        for state, capacity in zip(states, (40, 2**30), strict=True):
            launch.append(*new, *state.tensors().values(), at, None, **SMALL.op_kwargs(capacity, torch.float32))
    assert_same_rows(*(valid_rows(state, [24]) for state in states))
