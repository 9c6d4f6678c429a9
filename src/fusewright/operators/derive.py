"""The types of an operator's results: by a rule of ours where there is one, else by PyTorch's meta kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload

from fusewright.operators import shape_rules
from fusewright.operators.meta_kernels import infer, simplified
from fusewright.sizes.shape_env import ShapeEnv


def derive(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], env: ShapeEnv | None = None) -> object:
    """The type of the result(s) of op(args), from TensorTypes and Dims. Raises what the meta kernel raises."""
    if env is not None and env.has_equalities:
        args, kwargs = simplified(args, env), simplified(kwargs, env)  # type: ignore[assignment]
    found = shape_rules.by_rule(op, args, kwargs, env)
    if found is not NotImplemented:
        return found
    assumed = frozenset() if env is None else frozenset(env.assumed)
    found = infer(op, tuple(args), kwargs, shape_rules.result_device(args, kwargs), env)
    found = refined(op, args, kwargs, env, found)
    if env is not None and env.shown:
        more = (env.assumed - assumed) & env.shown
        if more and shape_rules.so_for_one(derive, op, args, kwargs, env, found):
            env.assumed -= more
    return found


def refined(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object], env: ShapeEnv | None, found: object
) -> object:
    """`found`, what the meta kernel gave, or what the rule gives now that the kernel has asked which sizes are equal:
    its layout is then that of sizes that are numbers."""
    if env is None or not env.has_equalities or op not in shape_rules.RULES:
        return found
    again = shape_rules.by_rule(op, simplified(args, env), simplified(kwargs, env), env)  # type: ignore[arg-type]
    return found if again is NotImplemented else again
