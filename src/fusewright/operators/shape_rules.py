"""Shape, stride and dtype rules of the operators that programs are full of: 5 to 20 µs, where meta kernels take up to
500.

Takes an operator with a TensorType in each tensor's place; gives the results' TensorTypes, equal to eager's, or
NotImplemented: then `meta_kernels.infer` decides (and raises the genuine error for arguments that are wrong).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusewright.base.signals import Signal
from fusewright.operators import generator_states, numpy_calls, user_kernels
from fusewright.operators.rules import collectives, cpu, create, linear, pointwise, quantized, reductions, views
from fusewright.operators.rules.common import Rule, Undecided
from fusewright.operators.rules.create import exact_device
from fusewright.sizes.expressions import Dim, Expr, substitute
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType, alike, symbols_in, with_sizes

_FILES = (
    collectives, cpu, create, linear, pointwise, quantized, reductions, views, generator_states, numpy_calls,
    user_kernels,
)  # fmt: skip
RULES: dict[OpOverload, Rule] = {op: rule for file in _FILES for op, rule in file.RULES.items()}


def by_rule(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], env: ShapeEnv | None = None
) -> object:
    """What the rule gives; NotImplemented when there is no rule, or it cannot tell. What depends on the value of a
    symbolic size is decided for sizes of 2 and more where `env` is given: the symbols are then `assumed` to be that
    large (as a meta kernel would ask)."""
    rule = RULES.get(op)
    if rule is None:
        return NotImplemented
    found, symbols = decided(rule, args, kwargs, env)
    if env is not None and symbols:
        if not symbols.isdisjoint(env.shown) and so_for_one(by_rule, op, args, kwargs, env, found):
            symbols -= env.shown
        env.assume(symbols)
    return found


def decided(
    rule: Rule, args: Sequence[object], kwargs: Mapping[str, object], env: ShapeEnv | None
) -> tuple[object, frozenset[Expr]]:
    """(what the rule gives, the symbols for which it does so only if they are at least 2); NotImplemented if it cannot
    tell even then."""
    try:
        return rule(*args, **kwargs), frozenset()
    except Undecided:
        if env is None:
            return NotImplemented, frozenset()
    larger, symbols = env.larger(symbols_in((args, kwargs)))
    if not symbols:
        return NotImplemented, frozenset()
    back: dict[Expr, Dim] = {new: old for old, new in larger.items() if isinstance(new, Expr)}
    given: Any = with_sizes(list(args), lambda size: substitute(size, larger))
    named: Any = with_sizes(dict(kwargs), lambda size: substitute(size, larger))
    try:
        found = rule(*given, **named)
    except Undecided:
        return NotImplemented, frozenset()
    if found is NotImplemented:
        return NotImplemented, frozenset()
    return with_sizes(found, lambda size: substitute(size, back)), symbols


def so_for_one(
    derive: Callable[..., object],
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    env: ShapeEnv,
    found: object,
) -> bool:
    """Whether `found`, the type of the results, is for sizes of 1 what `derive` gives for these (see
    `ShapeEnv.show`)."""
    one = env.one
    assert one is not None
    guards, assumed = len(one.guards), set(one.assumed)
    given: Any = with_sizes(list(args), one.simplify)
    named: Any = with_sizes(dict(kwargs), one.simplify)
    try:
        special = derive(op, given, named, one)
    except (Signal, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError):
        return False  # the operator takes no such sizes
    same = alike(with_sizes(found, one.simplify), with_sizes(special, one.simplify))
    return same and len(one.guards) == guards and one.assumed == assumed


def result_device(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    """The device of the results: asked for, else that of the first tensor with dimensions, else of the first tensor,
    else the CPU."""
    asked = kwargs.get("device")
    if asked is not None:
        return exact_device(asked)  # type: ignore[arg-type]
    first: torch.device | None = None
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, TensorType):
                if item.shape:
                    return item.device
                first = first or item.device
    return first or torch.device("cpu")


__all__ = ["RULES", "by_rule", "exact_device", "result_device"]
