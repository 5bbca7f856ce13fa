"""The contract's worked numbers, sections 1 to 3, through the kernels (section 4's softmax is in test_attention_kernels)."""

import pytest
import torch
from helpers import poisoned_state, random_tokens
from twin import launch_update

from kivi_ops import KiviConfig
from kivi_ops.kernels import launch

F32 = torch.float32
KEY = torch.tensor([[100, 0, 1, -1], [101, 1.5, 1.5, -0.5], [102, 0.5, 2, 0], [103, 1, 2.5, 0.5]])
VALUE = torch.tensor([[-100.0] * 4, [1, 0, 1, 0], [100.0] * 4, [0.0] * 4])


def through(role: str, x: torch.Tensor, device: str) -> torch.Tensor:
    """Quantised at 2 bits in groups of 4, and back: per channel as a Key, per token as a Value."""
    packed = getattr(launch, f"quantize_pack_{role}")(x[None].to(device), 2, 4, F32)
    return getattr(launch, f"unpack_dequantize_{role}")(*packed, 2, 4, x.shape[1], F32)[0].cpu()


def test_the_grid_of_minus_one_to_one_has_no_zero(device: str) -> None:
    restored = through("value", torch.tensor([[-1.0, -0.3, 0.3, 1.0]]), device)
    torch.testing.assert_close(restored, torch.tensor([[-1.0, -1 / 3, 1 / 3, 1.0]]))


@pytest.mark.parametrize("constant", [5.0, 0.0])
def test_constant_groups_are_exact(constant: float, device: str) -> None:
    assert torch.equal(through("value", torch.full((1, 4), constant), device), torch.full((1, 4), constant))


def test_keys_per_channel_and_values_per_token_are_exact(device: str) -> None:
    assert torch.equal(through("key", KEY, device), KEY)
    assert torch.equal(through("value", KEY, device)[0], torch.tensor([100.0, -1, -1, -1]))
    assert torch.equal(through("value", VALUE, device)[1], torch.tensor([1.0, 0, 1, 0]))
    torch.testing.assert_close(through("key", VALUE, device)[1], torch.full((4,), 33.333), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "seal, trace",
    [
        ("after_attention", {3: (3, 3, 3, 3), 4: (4, 0, 4, 4), 5: (1, 1, 5, 4), 8: (4, 0, 5, 4), 9: (1, 1, 5, 4)}),
        ("before_attention", {3: (3, 3, 3, 3), 4: (0, 0, 4, 4), 5: (1, 1, 4, 4), 8: (0, 0, 4, 4), 9: (1, 1, 4, 4)}),
    ],
)
def test_the_trace_table(seal: str, trace: dict[int, tuple[int, ...]], device: str) -> None:
    """T: K float in the step, K float kept, V float in the step, V float kept; float16 grids hold none of these float32 values exactly."""
    config = KiviConfig(residual_length=4, group_size=2, seal=seal, metadata_dtype=torch.float16)
    state = poisoned_state(config, 1, 1, 16, 32, 32, F32, device=device)
    key, value = (random_tokens(1, 1, 9, 32, seed=seed, device=device) for seed in (0, 1))
    for t in range(9):
        seen = launch_update(state, key[:, :, t : t + 1], value[:, :, t : t + 1], torch.tensor(t, device=device))
        if t + 1 in trace:
            key_float, key_kept, value_float, value_kept = trace[t + 1]
            for view, given, floats in zip(seen, (key, value), (key_float, value_float), strict=True):
                exact = (view[0, 0, : t + 1] == given[0, 0, : t + 1]).all(-1)
                assert exact.tolist() == [False] * (t + 1 - floats) + [True] * floats
            assert (t + 1 - state.sealed).tolist() == [[key_kept, value_kept]]
