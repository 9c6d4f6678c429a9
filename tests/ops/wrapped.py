"""PyTorch's `TwoTensor`, a tensor of two others, as the arguments of every operator, with its gradients.

Takes an entry of `op_db` and a sample; gives a function of plain tensors that wraps them, and takes apart what comes out. The class is
loaded as a module of the user's: capture takes PyTorch's own classes for a part of PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

_SPEC = importlib.util.spec_from_file_location(
    "two_tensor_of_a_user", Path(torch.__file__).parent / "testing" / "_internal" / "two_tensor.py"
)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
TwoTensor: Any = _MODULE.TwoTensor

LEFT_OUT = frozenset({"polar", "fft.hfft", "fft.hfft2", "fft.hfftn"})
"""In eager conjugates are lost inside: those of complex arguments, too."""


def wrapped(tree: Any) -> Any:
    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        other = leaf.detach() * 2 if leaf.is_floating_point() or leaf.is_complex() else leaf.detach().clone()
        return TwoTensor(leaf.detach(), other).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(wrap, tree)


def apart(tree: Any) -> Any:
    def take(leaf: Any) -> Any:
        if not isinstance(leaf, TwoTensor):
            return leaf
        return TwoTensor.__name__, tuple(leaf.shape), leaf.stride(), leaf.requires_grad, leaf.a, leaf.b

    return pytree.tree_map(take, tree)


def on_wrappers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its arguments as wrappers; gives its result and the arguments afterwards, taken apart."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = wrapped((args, kwargs))
        result = function(*args, **kwargs)
        return apart((result, (args, kwargs)))

    return run
