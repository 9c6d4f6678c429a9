"""flex_attention and create_block_mask: one graph, eager's values, layouts and gradients, whatever the mods do."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention, or_masks

import fusewright

warnings.filterwarnings("ignore", message="flex_attention called without", category=UserWarning)
hop = torch.ops.higher_order.flex_attention

LENGTH = 160
torch.manual_seed(0)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(LENGTH, LENGTH)
HEAD_BIAS = torch.randn(4, LENGTH, LENGTH)
DISTANCES = torch.randn(2 * LENGTH)
DOCUMENT = torch.arange(LENGTH) // 50
LENGTHS = torch.tensor([70, 150])


class Capped:
    def __init__(self, cap: float) -> None:
        self.cap = cap

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.cap * torch.tanh(score / self.cap)


def window(size: int) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) & (q - k < size)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def branching(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(h % 2 == 0, score, score * 0.5) - torch.abs(q - k) / 16


SCORE_MODS: dict[str, Any] = {
    "none": None,
    "relative": lambda s, b, h, q, k: s + (k - q),
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "cap": Capped(3.0),
    "bias": lambda s, b, h, q, k: s + BIAS[q, k],
    "bias_in_steps": lambda s, b, h, q, k: s + BIAS[q][k],
    "head_bias": lambda s, b, h, q, k: s + HEAD_BIAS[h, q, k],
    "first_head_bias": lambda s, b, h, q, k: s + HEAD_BIAS[0, q, k],
    "distance": lambda s, b, h, q, k: s + DISTANCES[q - k + LENGTH],
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "branching": branching,
    "constant": lambda s, b, h, q, k: s * 0,
}
MASKS: dict[str, Any] = {
    "causal": causal,
    "window": window(20),
    "document": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "padding": lambda b, h, q, k: k < LENGTHS[b],
    "heads": lambda b, h, q, k: (q >= k) | (h == 1),
    "and": and_masks(causal, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k]),
    "or": or_masks(window(8), lambda b, h, q, k: k < 16),
    "nothing_for_some": lambda b, h, q, k: (q >= k) & (q > 10),
    "prefix": lambda b, h, q, k: (k < LENGTHS[b] // 4) | (q >= k),
}


def operands(rows: int = LENGTH, key_heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(2, 4, rows, 16), (2, key_heads, LENGTH, 16), (2, key_heads, LENGTH, 8)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def check(function: Callable[..., Any], *args: Any) -> None:
    compiled = fusewright.compile(function, fullgraph=True)
    for given, wanted in zip(_leaves(compiled(*args)), _leaves(function(*args)), strict=True):
        assert given.stride() == wanted.stride()
        # an element near zero is a sum of rounded numbers near one
        least = {} if given.dtype in (torch.float32, torch.float64) else {"rtol": 0.02, "atol": 2e-3}
        torch.testing.assert_close(given, wanted, **least)


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if leaf is not None]


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    check(lambda q, k, v: flex_attention(q, k, v, score_mod=SCORE_MODS[name]) * 2, *operands())


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    """Made outside, and inside."""

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        block_mask = create_block_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
        return flex_attention(q, k, v, block_mask=block_mask, score_mod=branching)

    check(masked, *operands())
    made = create_block_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu")
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=made, return_lse=True), *operands())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("separate", [False, True])
def test_block_masks(name: str, separate: bool) -> None:
    """Every tensor of a block mask. (PyTorch 2.11 always keeps full blocks apart.)"""
    chooses = "separate_full_blocks" in inspect.signature(create_block_mask).parameters
    if not (chooses or separate):
        pytest.skip("this PyTorch has no block masks that keep full blocks with the others")
    options = {"separate_full_blocks": separate} if chooses else {}

    def tensors() -> list[torch.Tensor]:
        made = create_block_mask(MASKS[name], 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=(32, 16), **options)
        return [part for part in made.as_tuple() if isinstance(part, torch.Tensor)]

    compiled = fusewright.compile(tensors, fullgraph=True)
    for given, wanted in zip(compiled(), tensors(), strict=True):
        assert torch.equal(given, wanted) and given.dtype is wanted.dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 33, LENGTH])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_shapes(dtype: torch.dtype, rows: int, key_heads: int) -> None:
    """Decoding, groups of heads, and dtypes."""
    block_mask = create_block_mask(lambda b, h, q, k: q + 90 >= k, 2, None, rows, LENGTH, device="cpu")

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        aux = AuxRequest(lse=True)
        return flex_attention(
            q, k, v, branching, block_mask, scale=0.3, enable_gqa=True, return_aux=aux
        )  # fmt: skip

    check(grouped, *operands(rows, key_heads, dtype))


def test_layouts() -> None:
    """The result lies in memory as the query does."""
    q, k, v = operands()
    for order in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)]:
        back = [order.index(place) for place in range(4)]
        laid_out = [one.permute(order).contiguous().permute(back) for one in (q, k, v)]
        check(lambda q, k, v: flex_attention(q, k, v, score_mod=branching), *laid_out)


def test_lengths_that_vary() -> None:
    compiled = fusewright.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=branching), fullgraph=True, dynamic=True
    )
    for length in (40, 56, 33, 128):
        q, k, v = (one[:, :, :length] for one in operands())
        torch.testing.assert_close(compiled(q, k, v), flex_attention(q, k, v, score_mod=branching))


def test_a_mod_is_guarded() -> None:
    """A mod that changes, or what it reads, is another program."""
    factor = [1.0]

    def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: Any) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=mod)

    compiled = fusewright.compile(scaled, fullgraph=True)
    for mod in (lambda s, b, h, q, k: s * factor[0], branching):
        for factor[0] in (1.0, 2.0):
            torch.testing.assert_close(compiled(*operands(), mod), scaled(*operands(), mod))


def test_autocast() -> None:
    def cast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flex_attention(q, k, v, score_mod=branching)

    check(cast, *operands())


@pytest.mark.parametrize("mod", [name for name in SCORE_MODS if name != "none"])
@pytest.mark.parametrize("mask", ["causal", "nothing_for_some"])
def test_gradients(mod: str, mask: str) -> None:
    """Of the operator itself: the public function refuses gradients on a CPU."""
    block_mask = create_block_mask(MASKS[mask], 2, 4, LENGTH, LENGTH, device="cpu")
    options = flex._apply_kernel_options(*operands(), False, None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result, sums, _ = hop(q, k, v, SCORE_MODS[mod], block_mask.as_tuple(), 0.25, options)
        return result.square().sum() + sums.clamp(min=-100).sum()

    gradients = []
    for function in (attend, fusewright.compile(attend, fullgraph=True)):
        leaves = [one.requires_grad_() for one in operands(key_heads=2)]
        function(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for wanted, given in zip(*gradients, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (0, 3, 1, 2)], ids=str)
def test_layouts_of_gradients(order: tuple[int, ...], key_heads: int) -> None:
    """They are the operands', with the features side by side."""
    block_mask = create_block_mask(causal, 2, 4, LENGTH, LENGTH, device="cpu")
    options = flex._apply_kernel_options(*operands(), False, None)
    back = [order.index(place) for place in range(4)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hop(q, k, v, branching, block_mask.as_tuple(), 0.25, options)[0]

    found = []
    for function in (attend, fusewright.compile(attend, fullgraph=True)):
        leaves = [one.permute(order).contiguous().permute(back) for one in operands(key_heads=key_heads)]
        leaves = [one.requires_grad_() for one in leaves]
        result = function(*leaves)
        torch.manual_seed(1)
        found.append([result, *torch.autograd.grad(result, leaves, torch.randn_like(result))])
    for wanted, given in zip(*found, strict=True):
        assert given.stride() == wanted.stride()
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
