"""Rebuilding the outputs of a differentiated frame from what its graph returned.

Takes the `Rebuilt` rows; gives a callable (inputs, graph outputs) → the frame's outputs. Always holds: a view is made
by the program's own view operators under autograd, so that its base, its version and what may be done to it are as in
eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.capture.frame import Rebuilt
from fusewright.sizes.expressions import Expr, evaluate

Made = dict[int, Any]  # by the call's number
Maker = Callable[[Sequence[Any], Sequence[Any], Made], Any]


def rebuilder(
    rebuilt: tuple[Rebuilt, ...], symbols: tuple[Any, ...]
) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
    """`symbols`: for each input the symbolic size that it is, or None."""
    makers = [_maker(one, symbols) for one in rebuilt]

    def rebuild(inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        made: Made = {}
        return tuple([make(inputs, results, made) for make in makers])

    return rebuild


def _maker(one: Rebuilt, symbols: tuple[Any, ...]) -> Maker:
    from_input, position = one.base[0] == "input", one.base[1]
    static = not any(_has_symbol(step[1:3]) for step in one.steps)

    def make(inputs: Sequence[Any], results: Sequence[Any], made: Made) -> Any:
        value = inputs[position] if from_input else results[position]
        sizes = {} if static else {symbol: inputs[place] for place, symbol in enumerate(symbols) if symbol is not None}
        if one.steps:
            for target, args, kwargs, element, call, no_grad, leaf in one.steps:
                found = made.get(call)
                if found is None:
                    if not static:
                        args, kwargs = _concrete(args, sizes), _concrete(kwargs, sizes)
                    with torch.set_grad_enabled(not no_grad):
                        found = made[call] = target(value, *args, **kwargs)
                value = found if element is None else found[element]
                if leaf:  # also where its base has one: only what is told so itself gets a gradient
                    value.requires_grad_()
            if one.no_grad and value.requires_grad:
                value = value.detach()
        return value.requires_grad_() if one.leaf and not value.requires_grad else value

    return make


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_symbol(item) for item in value)
    return isinstance(value, Expr) or (isinstance(value, dict) and _has_symbol(list(value.values())))


def _concrete(value: Any, sizes: dict[Any, int]) -> Any:
    if isinstance(value, Expr):
        return evaluate(value, sizes)
    if isinstance(value, (list, tuple)):
        return type(value)(_concrete(item, sizes) for item in value)
    return {name: _concrete(item, sizes) for name, item in value.items()} if isinstance(value, dict) else value
