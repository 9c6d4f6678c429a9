"""The result types of any operator, from PyTorch's own meta kernels: right for everything, but 10 to 500 µs a call.

Takes an operator and arguments with a TensorType in each tensor's place; gives TensorTypes in each result's place.
Always holds: no storage is allocated, and `torch._dynamo` is not imported by this call (PyTorch's reference kernels
import it on their first use, which takes a second).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch._library import fake_impl, simple_registry
from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.operators.rules.common import Undecided, asking
from fusewright.operators.rules.corrections import correction_of
from fusewright.operators.rules.views import NO_VIEW, view_strides
from fusewright.operators.shape_rules import decided
from fusewright.sizes.expressions import Dim, Expr
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.symfloat import shape_float
from fusewright.sizes.symint import dim_of, size_of
from fusewright.sizes.tensor_type import TensorType, with_sizes

META = torch.device("meta")
aten = torch.ops.aten


def type_of(tensor: torch.Tensor, device: torch.device | None = None) -> TensorType:
    """The type of a real or meta tensor; `device` replaces its device."""
    return TensorType(
        tuple(map(dim_of, tensor.size())),
        tuple(map(dim_of, tensor.stride())),
        tensor.dtype,
        tensor.device if device is None else device,
        tensor.requires_grad,
        dim_of(tensor.storage_offset()),
    )


def meta_tensor(type_: TensorType, env: ShapeEnv | None = None) -> torch.Tensor:
    """A meta tensor of this type."""
    shape = [size_of(d, env) for d in type_.shape]
    stride = [size_of(d, env) for d in type_.stride]
    made = torch.empty_strided(shape, stride, dtype=type_.dtype, device=META)
    if isinstance(type_.offset, Expr) or type_.offset:
        made = made.as_strided(shape, stride, size_of(type_.offset, env))
    return made


class MetadataChanged(Exception):
    """An in-place operator changed the shape, strides or storage of an argument (for example `resize_`, or `out=` of a
    wrong size)."""


# Their meta kernels make tensors of numbers.
_QUANTISED = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))

Memo = dict[tuple[object, ...], object]


def infer_once(
    memo: Memo,
    op: OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    device: torch.device | None,
    env: ShapeEnv | None,
) -> object:
    """`infer`, which is asked only once for equal arguments of static sizes: the layers of a model repeat. (What a
    user's own operator says may depend on anything.)"""
    if op.namespace != "aten":
        return infer(op, tuple(args), kwargs, device, env)
    try:
        key = (op, _frozen(args), _frozen(kwargs), device, torch.get_default_dtype(), torch.is_grad_enabled())
        found = memo.get(key, memo)
    except TypeError:  # a symbolic size, or something that has no hash
        return infer(op, tuple(args), kwargs, device, env)
    if found is not memo:
        return found
    found = infer(op, tuple(args), kwargs, device, env)
    if all(isinstance(item, TensorType) for item in (found if isinstance(found, tuple) else (found,))):
        memo[key] = found  # a Python value may answer a question about PyTorch's settings (which attention to run)
    return found


def _frozen(value: object) -> object:
    """A hashable equal of an operator's argument; numbers with their class (1, 1.0 and True promote otherwise). Raises
    TypeError."""
    if isinstance(value, TensorType):
        if any(isinstance(d, Expr) for d in (*value.shape, *value.stride, value.offset)):
            raise TypeError("symbolic")
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (Expr, torch.Tensor, torch.SymInt, torch.Generator)):
        raise TypeError("symbolic")
    return type(value), value


def infer(
    op: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: torch.device | None,
    env: ShapeEnv | None,
) -> object:
    """The result types of `op`, as a TensorType, None, a Dim, or a tuple of these. Raises what the meta kernel raises.

    `device` is the results' device; it stands in for what meta tensors cannot carry.
    """
    _quieten_reference_kernels()
    if any(isinstance(value, torch.dtype) and value in _QUANTISED for value in (*args, *kwargs.values())):
        raise GraphBreak("unsupported-tensor", f"the result of {op} is a quantised tensor")
    made: list[tuple[TensorType, torch.Tensor]] = []

    def lower(value: object) -> object:
        if isinstance(value, TensorType):
            tensor = meta_tensor(value, env)
            made.append((value, tensor))
            return tensor
        if isinstance(value, Expr):
            return size_of(value, env)
        if isinstance(value, (tuple, list)):
            return type(value)([lower(item) for item in value])
        if isinstance(value, torch.device):
            return META
        return value

    lowered_args = tuple(lower(value) for value in args)
    lowered_kwargs = {name: lower(value) for name, value in kwargs.items() if name != "generator"}
    if "device" in kwargs or (not made and any(a.name == "device" for a in op._schema.arguments)):
        lowered_kwargs["device"] = META
    lowered_kwargs.pop("pin_memory", None)
    if env is not None and (env.symbols or env.unbacked):
        # A kernel that computes with sizes as floats must not do so in the program's graph.
        floats, env.float_of = env.float_of, functools.partial(shape_float, env)
        try:
            with torch._C._EnablePythonDispatcher():
                result = _kernel(op, env)(*lowered_args, **lowered_kwargs)
        finally:
            env.float_of = floats
    else:
        result = _kernel(op, env)(*lowered_args, **lowered_kwargs)
    for type_, tensor in made:
        after = type_of(tensor, type_.device)
        if _layout(after, env) != _layout(type_, env):
            raise MetadataChanged(f"{op} changed the shape of an argument from {type_} to {after}")
    said = _lift(op, result, device)
    correction = correction_of(op, device)
    if correction is None:
        return said
    if env is not None and env.has_equalities:  # the kernel may have asked which sizes are equal
        said, args, kwargs = (simplified(value, env) for value in (said, args, kwargs))  # type: ignore[assignment]
    found, larger = decided(correction, (said, *args), kwargs, env)
    if env is not None and larger:
        env.assume(larger)
    if found is NotImplemented and env is not None and not env.unbacked:
        with asking(env.guard), contextlib.suppress(Undecided):  # still: the arguments are not valid
            found = correction(said, *args, **kwargs)
    return said if found is NotImplemented else found


def fake_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """The shape function that a library gave for its operator (`torch.library.register_fake`), or None."""
    if op.namespace in ("aten", "prim", "prims", "fusewright"):
        return None
    entry = simple_registry.singleton._data.get(op.name())
    return None if entry is None or entry.fake_impl.kernel is None else entry.fake_impl.kernel


def _kernel(op: OpOverload, env: ShapeEnv | None) -> Callable[..., Any]:
    kernel = fake_kernel(op)
    if kernel is None:
        return _SYMBOLIC.get(op, op) if env is not None and (env.symbols or env.unbacked) else op

    def run(*args: Any, **kwargs: Any) -> Any:
        with fake_impl.set_ctx_getter(lambda: _NewSizes(op, env)):
            return kernel(*args, **kwargs)

    return run


class _NewSizes:
    """What `torch.library.get_ctx()` gives to a shape function."""

    def __init__(self, op: OpOverload, env: ShapeEnv | None) -> None:
        self.op, self.env = op, env

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        """A size that depends on data."""
        if self.env is None or not self.env.may_give:
            raise GraphBreak("data-dependent-shape", f"{self.op} gives a shape that depends on data")
        return size_of(self.env.create_unbacked(min, max), self.env)

    create_unbacked_symint = new_dynamic_size


def _constant_pad(self: torch.Tensor, pad: Sequence[int | torch.SymInt], value: complex = 0) -> torch.Tensor:
    """C++ clones what is left where nothing is added; PyTorch's Python version does so only where something is taken
    away on every side, and gives the strides of a new tensor otherwise."""
    result = aten.constant_pad_nd.default(self, pad, value)
    if any(amount > 0 for amount in pad):
        return result
    return self.as_strided(result.shape, self.stride()).clone()


def _view(self: torch.Tensor, size: Sequence[int | torch.SymInt]) -> torch.Tensor:
    shape, total = list(size), self.numel()
    free = [axis for axis, extent in enumerate(shape) if type(extent) is int and extent == -1]
    others: Any = math.prod(extent for axis, extent in enumerate(shape) if axis not in free)
    if len(free) > 1 or (others == 0 or total % others != 0 if free else others != total):
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {total}")
    for axis in free:
        shape[axis] = total // others
    type_ = TensorType(self.shape, self.stride(), self.dtype, self.device)  # type: ignore[arg-type]
    strides: Any = view_strides(type_, shape, operator.eq, operator.lt)  # type: ignore[arg-type]
    if strides is None:
        raise RuntimeError(NO_VIEW)
    return self.as_strided(shape, strides)


_SYMBOLIC: dict[OpOverload, Callable[..., object]] = {
    aten.constant_pad_nd.default: _constant_pad,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
"""What stands for operators whose Python meta kernel, used over symbolic sizes, differs from C++'s."""


def simplified(value: object, env: ShapeEnv) -> object:
    """An operator's argument (types in the tensors' places) with the sizes that guards have fixed since it was
    recorded."""
    return with_sizes(value, env.simplify)


def _layout(type_: TensorType, env: ShapeEnv | None) -> tuple[Dim, ...]:
    """Shape, strides and offset, with the equalities applied that the kernel itself may have asked for."""
    dims = (*type_.shape, *type_.stride, type_.offset)
    return dims if env is None else tuple(map(env.simplify, dims))


def _lift(op: OpOverload, result: object, device: torch.device | None) -> object:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise GraphBreak("unsupported-tensor", f"the result of {op} is a sparse tensor ({result.layout})")
        return type_of(result, device)
    if isinstance(result, (tuple, list)):
        return tuple(_lift(op, item, device) for item in result)
    if isinstance(result, torch.SymInt):
        return dim_of(result)
    return result


# --- keeping torch._dynamo out ----------------------------------------------------------------------------------------

_quiet = False


def _quieten_reference_kernels() -> None:
    """Stop PyTorch's Python meta kernels from importing torch._dynamo.

    They are wrapped by `torch._compile._disable_dynamo`, which imports torch._dynamo on the first call to ask for a
    function under which frames are not compiled, and keeps it as the attribute `__dynamo_disable`. While torch._dynamo
    is not loaded nothing could compile those frames, so the function itself serves; as soon as it is loaded, the
    attribute is dropped and PyTorch's way resumes.
    """
    global _quiet
    if _quiet:
        return
    _quiet = True
    wrapper_code = torch._disable_dynamo(_quieten_reference_kernels).__code__
    prefixes = ("torch._refs", "torch._decomp", "torch._prims", "torch._meta_registrations")
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes):
            pending = list(vars(module).values())
            while pending:
                value = pending.pop()
                if not isinstance(value, types.FunctionType) or id(value) in seen:
                    continue
                seen.add(id(value))
                inside = {
                    n: _contents(c) for n, c in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                }
                # what a wrapper wraps is in its closure; `__wrapped__` is overwritten by some
                pending.extend(inside.values())
                if value.__code__ is wrapper_code and not hasattr(inside["fn"], "__dynamo_disable"):
                    inside["fn"].__dynamo_disable = _direct(inside["fn"], value)  # type: ignore[attr-defined, arg-type]


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _direct(function: Callable[..., object], wrapper: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if "torch._dynamo" in sys.modules:
            del function.__dynamo_disable  # type: ignore[attr-defined]
            return wrapper(*args, **kwargs)
        return function(*args, **kwargs)

    return call


__all__ = ["MetadataChanged", "infer", "infer_once", "meta_tensor", "simplified", "type_of"]
