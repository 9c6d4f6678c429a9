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
    if env is not None and env.shown:
        more = (env.assumed - assumed) & env.shown
        if more and shape_rules.so_for_one(derive, op, args, kwargs, env, found):
            env.assumed -= more
    return found
