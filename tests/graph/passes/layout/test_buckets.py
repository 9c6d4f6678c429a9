"""The option `bucket`: sizes are padded where that is exact, and compiled for any size, with a hint, where it is not shown to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fusewright
from fusewright.base.errors import OptionError
from fusewright.base.events import STREAM, Broken, Compiled, Event, FellBack, Hint, InternalError, Skipped

BUCKETS = {"seq": [8, 16]}
LINEAR = nn.Linear(16, 16)
NORM = nn.LayerNorm(16)
TABLE = nn.Embedding(50, 16)


def attention(x: torch.Tensor, causal: bool = False, mask: torch.Tensor | None = None) -> torch.Tensor:
    q = LINEAR(x).view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2)
    done = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=causal)
    return done.transpose(1, 2).reshape(x.shape[0], x.shape[1], 16)


def run(function: Callable[..., Any], calls: list[tuple[Any, ...]], buckets: Any = None) -> tuple[int, list[str]]:
    """(compiles, hints) of these calls, each of which gave what eager gives."""
    events: list[Event] = []
    compiled = fusewright.compile(function, options={"bucket": buckets or BUCKETS})
    with torch.no_grad(), STREAM.listening(events.append):
        for args in calls:
            got, want = compiled(*args), function(*args)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()
    bad = [event for event in events if isinstance(event, FellBack | InternalError | Skipped | Broken)]
    assert not bad, bad
    return sum(isinstance(event, Compiled) for event in events), [
        event.text for event in events if isinstance(event, Hint)
    ]


EXACT: dict[str, Callable[..., Any]] = {
    "rows apart": lambda x: NORM(functional.gelu(LINEAR(x))) + x,
    "flattened": lambda x: LINEAR(x).view(-1, 4, 4) * x.shape[1],
    "sum": lambda x: LINEAR(x).sum(1) + x.mean(1) - x.amax(1),
    "softmax": lambda x: x.softmax(1) + x.cumsum(1),
    "products": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "attention": attention,
    "causal": lambda x: attention(x, True),
    "masked": lambda x: attention(x, mask=x[:, None, :, :1].transpose(2, 3) > -1),
    "not a number": lambda x: ((x / x.abs().sum(-1, keepdim=True)).transpose(1, 2) @ x).sum(1),
    "the first": lambda x: torch.tanh(x[:, 0]),
}


@pytest.mark.parametrize("name", EXACT)
def test_padding_is_exact(name: str) -> None:
    """One compile a bucket, whatever stands in the padding, and one for larger sizes."""
    torch.manual_seed(0)
    calls = [(torch.randn(2, length, 16),) for length in (5, 8, 3, 12, 16, 20, 40)]
    assert run(EXACT[name], calls) == (3, [])


NOT_SHOWN: dict[str, tuple[Callable[..., Any], str]] = {
    "flip": (lambda x: x.flip(1), "flip is not known to keep positions apart"),
    "order": (lambda x: x.view(x.shape[1], x.shape[0], 16) * 2, "another order"),
    "the last": (lambda x: x[:, -1] * 2, "not the first"),
    "a part": (lambda x: x[:, 1:] * 2, "a part of the dimension is taken"),
    "fixed": (lambda x: x * 2 if x.shape[1] == 5 else x, "fixes that size to 5"),
}


def test_results_share_memory_as_eagerly() -> None:
    """A view of an input, and views of one result, are what they are in eager."""
    for function in (
        lambda x: (x.transpose(0, 1), x * 2),
        lambda x: (lambda y: (y, y.transpose(1, 2)))(LINEAR(x)),
        lambda x: (x, x + 1),
    ):
        compiled = fusewright.compile(function, options={"bucket": BUCKETS})
        with torch.no_grad():
            for length in (5, 8, 12):
                x = torch.randn(2, length, 16)
                got, want = compiled(x), function(x)
                torch.testing.assert_close(got, want)
                storages = [[t.untyped_storage().data_ptr() for t in (x, *results)] for results in (got, want)]
                assert [first.index(s) for first in storages[:1] for s in first] == [
                    storages[1].index(s) for s in storages[1]
                ]


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_is_not_shown_to_be_exact(name: str) -> None:
    function, reason = NOT_SHOWN[name]
    _, hints = run(function, [(torch.randn(2, length, 16),) for length in (5, 8, 12)])
    assert any(reason in hint for hint in hints), hints


def test_names_of_dimensions() -> None:
    tokens = lambda length: torch.randint(0, 50, (3, length))
    assert run(lambda ids: TABLE(ids), [(tokens(n),) for n in (5, 8, 12, 16)]) == (2, [])
    pairs = [(torch.randn(n, 16), torch.randn(6, 16)) for n in (3, 4, 5, 8)]
    assert run(lambda x, y: LINEAR(x) + y.sum(0), pairs, {"x.0": [4, 8]}) == (2, [])


def test_gradients_are_not_bucketed() -> None:
    """A call that wants gradients is compiled for any size, and says so."""
    hints: list[Event] = []
    compiled = fusewright.compile(lambda x: (LINEAR(x) ** 2).sum(1), options={"bucket": BUCKETS})
    for length in (5, 12):
        x = torch.randn(2, length, 16, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        with STREAM.listening(hints.append):
            compiled(x).sum().backward()
        (LINEAR(other) ** 2).sum(1).sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    assert "gradients" in "".join(event.text for event in hints if isinstance(event, Hint))


@pytest.mark.parametrize(
    "value", [{"length": [8]}, {"seq": []}, {"seq": [16, 8]}, {"seq": [0, 8]}, {"x.y": [8]}, {"seq": 8}]
)
def test_wrong_buckets(value: Any) -> None:
    with pytest.raises(OptionError, match="bucket"):
        fusewright.compile(lambda x: x, options={"bucket": value})


def test_buckets_need_changing_sizes() -> None:
    with pytest.raises(OptionError, match="dynamic=False"):
        fusewright.compile(lambda x: x, dynamic=False, options={"bucket": BUCKETS})
