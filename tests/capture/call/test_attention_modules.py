"""Modules of attention in inference, where PyTorch takes a shortcut of its own: the same results, whatever the masks, in one graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fusewright

LENGTH = 5
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
ATTENTION_MASKS: dict[str, Any] = {
    "none": None,
    "numbers": torch.tensor([0.0, 1.0, 0.0, -2.0, 0.5]).repeat(LENGTH, 1),
    "causal": nn.Transformer.generate_square_subsequent_mask(LENGTH),
    "bool": torch.ones(LENGTH, LENGTH).triu(1).bool(),
    "nothing is left": torch.ones(LENGTH, LENGTH).bool(),
    "for each head": torch.arange(4 * LENGTH * LENGTH).remainder(3).reshape(4, LENGTH, LENGTH).bool(),
}
PADDING_MASKS: dict[str, Any] = {
    "none": None,
    "numbers": PADDING * 0.5,
    "bool": PADDING.bool(),
    "nothing is left": torch.tensor([[0], [1]]).expand(2, LENGTH).bool(),
}
MASKS = list(itertools.product(ATTENTION_MASKS, PADDING_MASKS))


def x_of(batch_first: bool) -> torch.Tensor:
    return torch.randn(2, LENGTH, 8) if batch_first else torch.randn(LENGTH, 2, 8)


@pytest.mark.filterwarnings("ignore:.*mask")
@pytest.mark.parametrize(
    ("activation", "norm_first", "batch_first", "backend"),
    [
        ("relu", False, True, "native"),
        ("gelu", True, True, "native"),
        ("gelu", False, True, "eager"),
        ("relu", True, False, "native"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_encoder_layers(activation: str, norm_first: bool, batch_first: bool, backend: str, autocast: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, activation, norm_first=norm_first, batch_first=batch_first).eval()
    x = x_of(batch_first)
    compiled = fusewright.compile(layer, backend=backend, fullgraph=True, recompile_limit=100)
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast):
        for attention, padding in MASKS:
            masks = {"src_mask": ATTENTION_MASKS[attention], "src_key_padding_mask": PADDING_MASKS[padding]}
            expected = layer(x, **masks)
            result = compiled(x, **masks)
            close = {"atol": 0.04, "rtol": 0.02} if autocast else {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(result, expected, **close, equal_nan=True, msg=f"{attention}, {padding}")
            assert result.stride() == expected.stride()


@pytest.mark.filterwarnings("ignore:.*mask")
@pytest.mark.parametrize(
    ("weights", "average", "grad"),
    [(True, True, False), (True, False, False), (False, True, False), (False, True, True)],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_of_a_tensor_to_itself(weights: bool, average: bool, grad: bool, autocast: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = x_of(True)
    compiled = fusewright.compile(module, fullgraph=True, recompile_limit=100)
    close = {"atol": 0.01, "rtol": 0.02} if autocast else {"atol": 1e-5, "rtol": 1e-5}
    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
        for attention, padding in MASKS:
            how = {"need_weights": weights, "average_attn_weights": average}
            masks = {"attn_mask": ATTENTION_MASKS[attention], "key_padding_mask": PADDING_MASKS[padding]}
            for result, expected in zip(
                compiled(x, x, x, **masks, **how), module(x, x, x, **masks, **how), strict=True
            ):
                if expected is None:
                    assert result is None
                    continue
                torch.testing.assert_close(result, expected, **close, equal_nan=True, msg=f"{attention}, {padding}")
                assert result.stride() == expected.stride(), (attention, padding)


def test_the_switch_of_the_shortcut_is_guarded() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    x, mask = x_of(True), ATTENTION_MASKS["numbers"]
    compiled = fusewright.compile(layer)
    with torch.no_grad():
        try:
            for enabled in (True, False, True):
                torch.backends.mha.set_fastpath_enabled(enabled)
                torch.testing.assert_close(compiled(x, mask), layer(x, mask), atol=1e-5, rtol=1e-5)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


PLACES = torch.arange(6)
ENCODER_PADDING: dict[str, torch.Tensor] = {
    "last": PLACES >= torch.tensor([[2], [4], [3]]),
    "last, one whole": PLACES >= torch.tensor([[6], [4], [3]]),
    "last, one empty": PLACES >= torch.tensor([[0], [4], [3]]),
    "first": PLACES < torch.tensor([[2], [4], [3]]),
    "one of them in the middle": (PLACES == torch.tensor([[2], [5], [5]])),
    "nowhere": torch.zeros(3, 6).bool(),
}
ENCODER_PADDING["numbers"] = torch.zeros(3, 6).masked_fill(ENCODER_PADDING["last"], -torch.inf)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(("nested", "norm", "inside"), [(True, True, False), (True, False, True), (False, True, False)])
def test_padded_places_of_an_encoder(backend: str, nested: bool, norm: bool, inside: bool) -> None:
    """Eager computes with nested tensors if the padding comes last, and leaves zeros (before the norm at the end) where nothing was."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None, enable_nested_tensor=nested).eval()
    nn.init.normal_(encoder.layers[1].linear2.bias)
    if norm:
        nn.init.normal_(encoder.norm.bias)

    def whole(x: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        return encoder(x * 2, mask, padding, False).mean(1)

    def alone(x: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        return encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=False)

    function = whole if inside else alone
    compiled = fusewright.compile(function, backend=backend, fullgraph=True, recompile_limit=100)
    root = fusewright.compile(encoder, backend=backend, fullgraph=True, recompile_limit=100)
    x = torch.randn(3, 6, 8)
    near = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True}
    for grad in (False, True):
        for name, padding in ENCODER_PADDING.items():
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(compiled(x, padding), function(x, padding), **near, msg=f"{name}, {grad}")
                torch.testing.assert_close(
                    root(x, None, padding), encoder(x, None, padding), **near, msg=f"{name}, {grad}"
                )
    with torch.no_grad():
        causal = nn.Transformer.generate_square_subsequent_mask(6)
        last = ENCODER_PADDING["numbers"]
        torch.testing.assert_close(compiled(x, last, causal), function(x, last, causal), **near)
        torch.testing.assert_close(compiled(x, None), function(x, None), **near)
        encoder.use_nested_tensor = not nested
        torch.testing.assert_close(compiled(x, last), function(x, last), **near)
        encoder.use_nested_tensor = nested
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(compiled(x, last), function(x, last), **near)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(compiled(x[:2, :5], last[:2, :5]), function(x[:2, :5], last[:2, :5]), **near)


def test_a_program_is_told_whether_the_fast_path_is_on() -> None:
    def program(x: torch.Tensor, on: bool) -> tuple[bool, bool, torch.Tensor]:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(on)
        return before, torch.backends.mha.get_fastpath_enabled(), x + 1

    compiled = fusewright.compile(program)
    try:
        for now, then in ((True, False), (False, False), (False, True), (True, True)):
            assert compiled(torch.ones(2), then)[:2] == (now, then)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
