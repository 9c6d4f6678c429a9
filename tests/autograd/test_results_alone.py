"""Operators with several results, called directly: the gradients of each subset of the results are eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright

aten = torch.ops.aten
MEAN, VARIANCE = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
BATCH = (MEAN, VARIANCE, False, 0.1, 1e-5)

NORMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "group": (lambda x, w, b: torch.native_group_norm(x, w, b, 2, 6, 20, 3, 1e-5), ((6,), (6,))),
    "group, plain": (lambda x: torch.native_group_norm(x, None, None, 2, 6, 20, 3, 1e-5), ()),
    "group, inside": (lambda x, w: torch.native_group_norm(x * 2, w, None, 2, 6, 20, 3, 1e-5)[:0:-1], ((6,),)),
    "group, mean": (lambda x, w: torch.native_group_norm(x, w, None, 2, 6, 20, 3, 1e-5)[:2], ((6,),)),
    "layer": (lambda x, w, b: torch.native_layer_norm(x, [4, 5], w, b, 1e-5), ((4, 5), (4, 5))),
    "layer, plain": (lambda x: torch.native_layer_norm(x, [5], None, None, 1e-5), ()),
    "rms": (lambda x, w: aten._fused_rms_norm(x, [5], w, 1e-5), ((5,),)),
    "batch": (lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5), ((6,), (6,))),
    "batch, running": (
        lambda x, w, b: torch.native_batch_norm(x, w, b, MEAN.clone(), VARIANCE.clone(), True, 0.1, 1e-5), ((6,), (6,)),
    ),
    "batch, evaluated": (lambda x, w, b: torch.native_batch_norm(x, w, b, *BATCH), ((6,), (6,))),
    "batch, legit": (lambda x, w, b: aten._native_batch_norm_legit(x, w, b, *BATCH), ((6,), (6,))),
    "batch, without": (lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5), ((6,), (6,))),
    "batch, functional": (
        lambda x, w, b: aten._batch_norm_with_update(x, w, b, MEAN.clone(), VARIANCE.clone(), 0.1, 1e-5), ((6,), (6,)),
    ),
    "weight": (lambda x, g: torch._weight_norm_interface(x, g, 0), ((2, 1, 1, 1),)),
    "variance": (lambda x: torch.var_mean(x, (1, 3)), ()),
    "deviation": (lambda x: torch.std_mean(x, 2), ()),
    "ends": (lambda x: torch.aminmax(x), ()),
}  # fmt: skip


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_of_each_subset_of_the_results(name: str, create_graph: bool) -> None:
    function, shapes = NORMS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 6, 4, 5), *shapes)]
    compiled = fusewright.compile(function)
    places = range(len(function(*inputs)))
    subsets = [subset for size in places for subset in itertools.combinations(places, size + 1)]
    for subset in subsets:
        found = [_gradients(one, inputs, subset, create_graph) for one in (function, compiled)]
        if isinstance(found[0], str):
            assert found[0] == found[1], subset
            continue
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5, equal_nan=True, msg=str(subset))


def _gradients(function: Any, inputs: list[torch.Tensor], subset: tuple[int, ...], create_graph: bool) -> Any:
    """The gradients, or what the error says."""
    results = [one for place, one in enumerate(function(*inputs)) if place in subset]
    tangents = [torch.linspace(-1, 2, one.numel()).view(one.shape) for one in results]
    try:
        found = torch.autograd.grad(results, inputs, tangents, allow_unused=True, create_graph=create_graph)
    except RuntimeError as error:
        return str(error)
    return [torch.tensor([]) if one is None else one.detach() for one in found]
