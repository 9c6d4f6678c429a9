"""Which sizes of an input are symbolic.

Takes a real tensor, its source and the capture's options; gives the symbols of its symbolic dimensions.
Always holds: no size is made symbolic from an example of 0 or 1 (what that example does may be particular to it),
unless the driver asks to take batches of 1 for larger ones: it then shows that the code does the same for 1; parameters
and buffers of modules stay static unless marked; under `dynamic=None` a size is symbolic once it has been seen with two
values, and the first size of a tensor together with any other. Two kinds of functions are known to vary before a size
was seen twice: what varies in one argument varies in those that a later version meets for the first time; and what
leaves tensors in its arguments (a key-value cache) will meet them again. A size marked with mark_dynamic that the
program fixes is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base import marks
from fusewright.base.errors import DynamicMarkError
from fusewright.base.signals import Retry, SkipFrame
from fusewright.capture.border.effects import changed, contents
from fusewright.capture.border.values.nested import is_cached_length
from fusewright.capture.guards import Guard
from fusewright.capture.guards.sources import (
    Attribute,
    FunctionSource,
    InstanceDict,
    Item,
    Local,
    Source,
    TensorSize,
    TensorStride,
)
from fusewright.capture.guards.types import SMALL_SIZES
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.expressions import Expr, Relation
from fusewright.sizes.strides import free_strides

if TYPE_CHECKING:
    from fusewright.base.location import Location
    from fusewright.capture.border.interfaces import Tracer, World
    from fusewright.capture.settings import CaptureOptions
    from fusewright.sizes.expressions import Symbol
    from fusewright.sizes.shape_env import ShapeEnv


SEVERAL = 5
"""What a size of 1 is taken to be where batches of 1 stand for larger ones: seldom another size of a program."""


def symbolic_dims(real: torch.Tensor, source: Source, world: World) -> dict[int, Symbol]:
    """dimension → symbol, for the dimensions of this input that are to be symbolic."""
    options, env = world.tracer.options, world.recorder.env
    marked = _marked(real, marks.DYNAMIC)
    maybe = _marked(real, marks.MAYBE_DYNAMIC) | _marked(real, marks.UNBACKED)
    if is_cached_length(source):  # PyTorch's own mark, of which the user knows nothing
        marked, maybe = set(), maybe | marked
    wanted = _wanted(real, source, world)
    buckets = _buckets(real, source, world.module_sources, options)
    if env is None or options.dynamic is False:
        return {}
    chosen: dict[int, Symbol] = {}
    for dim in sorted((wanted | maybe | buckets.keys()) - _marked(real, marks.STATIC) | marked):
        size = real.shape[dim]
        lower, upper = _range(real, dim)
        if size < (lower or 0) or (upper is not None and size > upper):
            ends = "" if upper is None else str(upper)
            raise SkipFrame(
                "size-out-of-range", f"{source.text()}.size({dim}) is {size}; it is marked as {lower or 0}..{ends}"
            )
        if size == 1 and (dim in marked or (dim == 0 and real.dim() > 1)) and (upper is None or upper >= SEVERAL):
            if not options.ones:
                env.ones.add(TensorSize(source, dim))
                continue
            size = SEVERAL
        if size < 2:
            continue
        chosen[dim] = made = env.create(f"s{len(env.symbols)}", size, TensorSize(source, dim), lower or 0, upper)
        if size != real.shape[dim]:
            env.take(made)
        if dim in buckets:
            env.buckets[made] = buckets[dim]
        if dim in marked:
            env.promised.add(made)
            env.declared[made] = (lower, upper)
    return chosen


def symbolic_steps(real: torch.Tensor, source: Source, world: World) -> dict[int, Symbol]:
    """dimension → symbol, for the strides of an argument that are no products of its sizes, and vary: a window on a
    tensor that grows."""
    options, code, env = world.tracer.options, world.tracer.function.__code__, world.recorder.env
    if env is None or options.dynamic is False or options.level != "aten" or isinstance(real, torch.nn.Parameter):
        return {}
    free = free_strides(real)
    if not free or not from_argument(source, world.module_sources):
        return {}
    wanted = set(free)
    if not is_symbolic_throughout(world.tracer):
        key: Any = (code, "strides", source)
        seen = world.tracer.history.setdefault(key, real.stride())
        world.tracer.history[key] = merged = tuple(old if old == new else None for old, new in zip(seen, real.stride()))
        wanted = {dim for dim in free if dim < len(merged) and merged[dim] is None}
    return {
        dim: env.create(f"t{len(env.symbols)}", real.stride(dim), TensorStride(source, dim))
        for dim in free
        if dim in wanted
    }


DIMENSIONS = {"batch": 0, "seq": 1}
"""The names that the option `bucket` has for a dimension of every tensor argument of two dimensions or more."""


def _buckets(
    real: torch.Tensor, source: Source, modules: set[Source], options: CaptureOptions
) -> dict[int, tuple[int, ...]]:
    """dimension → the sizes that it may be padded to."""
    if not options.bucket or isinstance(real, torch.nn.Parameter) or not from_argument(source, modules):
        return {}
    at: Any = source
    name = str(at.key if isinstance(at, Item) else at.name if isinstance(at, (Local, Attribute)) else "")
    found: dict[int, tuple[int, ...]] = {}
    for dim in range(real.dim()):
        names = [f"{name}.{dim}", *(known for known, place in DIMENSIONS.items() if place == dim and real.dim() > 1)]
        for known in names:
            if known in options.bucket:
                found.setdefault(dim, options.bucket[known])
    return found


def check_marks(env: ShapeEnv | None) -> None:
    """Raises DynamicMarkError for a size that is marked as dynamic and that the program has fixed, or takes only a part
    of the range of."""
    if env is None:
        return
    for symbol in env.promised:
        value = env.simplify(symbol)
        source: Any = env.symbols[symbol].source
        name = source.base.name if isinstance(source.base, Local) else source.base.text()
        if isinstance(value, int):
            raise DynamicMarkError(
                f"{name} is marked as dynamic in dimension {source.dim}, but the program fixes that size to {value}"
                f"{_where(env.fixed_at.get(symbol, ()))}. "
                "Change the line so that any size will do, use maybe_mark_dynamic, or do not mark it."
            )
        (least, most), (low, high) = env.declared[symbol], env.range_of(symbol)
        too_small = least is not None and low is not None and low > least
        too_large = most is not None and high is not None and high < most
        if too_small or too_large:
            took = f"at least {low}" if too_small else f"at most {high}"
            raise DynamicMarkError(
                f"{name} is marked as dynamic in dimension {source.dim} with sizes "
                f"{least or 0}..{'' if most is None else most}, but the "
                f"program takes another path for sizes that are not {took}{_where(env.narrowed_at.get(symbol, ()))}. "
                f"Mark it with {'min=' + str(low) if too_small else 'max=' + str(high)}, or change the line."
            )


def _where(stack: tuple[Location, ...]) -> str:
    return f" at {stack[-1]}" if stack else " while the graph was compiled"


def _marked(real: torch.Tensor, name: str) -> set[int]:
    return {dim for dim in getattr(real, name, ()) if dim < real.dim()}


def _range(real: torch.Tensor, dim: int) -> tuple[int | None, int | None]:
    for marked in getattr(real, marks.RANGES, ()):
        if marked.dim == dim:
            return marked.min, marked.max
    return None, None


def _wanted(real: torch.Tensor, source: Source, world: World) -> set[int]:
    env, code = world.recorder.env, world.tracer.function.__code__
    if env is None or isinstance(real, torch.nn.Parameter) or not from_argument(source, world.module_sources):
        return set()
    sizes = tuple(real.shape)
    if world.tracer.options.dynamic is False:
        return set()
    every = {dim for dim, size in enumerate(sizes) if size > 1 or dim == 0}
    if is_symbolic_throughout(world.tracer):
        return every
    history = world.tracer.history
    seen = history.get((code, source))
    if seen is None or len(seen) != len(sizes):
        history[code, source] = sizes
        if (code, CAPTURED) not in history:
            return set()
        if (code, VARIES) in history:
            return every
        env.first_met.append((code, source))
        return set()
    merged = tuple(old if old == new else None for old, new in zip(seen, sizes, strict=False))
    history[code, source] = merged
    differing = {dim for dim, size in enumerate(merged) if size is None}
    if not differing:
        return differing
    history[code, VARIES] = ()
    # The first dimension is the batch as a rule: where other sizes vary, it will.
    return differing | {0}


CAPTURED, VARIES, KEEPS = "captured", "varies", "keeps"
"""What is known of a function as a whole, kept beside the sizes of its arguments: it was captured before, a size of an
argument has changed, it leaves tensors in its arguments."""


def is_symbolic_throughout(tracer: Tracer) -> bool:
    """Whether all sizes of arguments are symbolic from the start."""
    dynamic = tracer.options.dynamic
    return dynamic is True or (dynamic is None and (tracer.function.__code__, KEEPS) in tracer.history)


def check_history(world: World) -> None:
    """Called at the end of an attempt: raises Retry when it has shown more sizes to vary than it took symbols for."""
    options, code, env = world.tracer.options, world.tracer.function.__code__, world.recorder.env
    if options.dynamic is not None or env is None:
        return
    history = world.tracer.history
    if (code, KEEPS) not in history and _keeps_tensors(world):
        history[code, KEEPS] = ()
        raise Retry
    if env.first_met and (code, VARIES) in history:
        for key in env.first_met:
            del history[key]
        raise Retry


def check_results(world: World, results: tuple[object, ...]) -> None:
    """As check_history, once it is known what the frame returns: a tensor of an argument that comes back longer (a
    cache that callers hand from call to call) will be met again with other sizes. The first version stays static: a
    plain concatenation looks so too."""
    options, code = world.tracer.options, world.tracer.function.__code__
    if options.dynamic is not None or world.recorder.env is None:
        return
    history = world.tracer.history
    if (
        (code, CAPTURED) in history
        and (code, KEEPS) not in history
        and any(_is_longer(value, world) for value in results)
    ):
        history[code, KEEPS] = ()
        raise Retry
    history[code, CAPTURED] = ()


def _is_longer(value: object, world: World) -> bool:
    """Whether a result is a tensor of an argument with more behind or before it, along a dimension that is not
    symbolic."""
    if not isinstance(value, TracedTensor) or value.node.target is not torch.ops.aten.cat.default:
        return False
    parts: Any = value.node.args[0]
    dim: Any = value.node.args[1] if len(value.node.args) > 1 else 0
    for part in parts:
        traced: Any = part.meta.get("example_value") if part.op == "placeholder" else None
        record = None if traced is None else world.outside(traced)
        if record is not None and from_argument(record.source, world.module_sources):
            if traced.tensor_type.shape == (0,):  # joins tensors of any rank
                continue
            size = traced.tensor_type.shape[dim]
            return isinstance(size, int) and size > 0
    return False


def _keeps_tensors(world: World) -> bool:
    """Whether the frame uses a place in an argument as its memory: it leaves a tensor where there was one of another
    shape, or where there was none and it has looked. (A place that is only written to takes a result.)"""
    for namespace in world.written_dicts():
        if from_argument(namespace.source, world.module_sources):
            for key, value in namespace.stores.items():
                before = namespace.real.get(key)
                if (before is not None or key in namespace.loaded or key in namespace.read_back) and _differs(
                    before, value, world
                ):
                    return True
    for shadow in world.effects.shadows:
        if changed(shadow) and from_argument(shadow.source, world.module_sources):
            if any(
                _differs(before, after, world)
                for before, after in zip(shadow.items, contents(shadow.value), strict=False)
            ):
                return True
    return False


def _differs(before: object, after: object, world: World) -> bool:
    """Whether tensors made by the frame stand where there was nothing, or tensors of other shapes."""
    if after is before:
        return False
    shapes = [tuple(tensor.shape) for tensor in _members(before) if isinstance(tensor, torch.Tensor)]
    if before is not None and not shapes:
        return False
    made = [
        tensor
        for tensor in _members(after)
        if isinstance(tensor, TracedTensor) and tensor.dim() and world.outside(tensor) is None
    ]
    return any(tuple(tensor.shape) not in shapes for tensor in made)


def _members(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def from_argument(source: Any, modules: set[Source]) -> bool:
    """Whether a tensor or a number comes with the call (an argument, an element or an attribute of one), not from a
    module or a global."""
    while isinstance(source, (Item, InstanceDict, Attribute)):
        source = source.base
        if source in modules:
            return False
    return isinstance(source, Local)


def size_guards_since(env: ShapeEnv | None, count: int, assumed: frozenset[Expr]) -> tuple[Guard, ...]:
    """Guards on sizes that were learnt after the first `count` and the first assumptions: passes over the graph may ask
    more."""
    if env is None or (len(env.guards) == count and env.assumed == assumed):
        return ()
    check_marks(env)
    sources = {known.symbol.name: known.source for known in env.symbols.values()}
    learnt = [
        Guard("SIZE", FunctionSource(), (relation, sources), "asked by a pass") for relation in list(env.guards)[count:]
    ]
    more = sorted(known.symbol.name for known in env.symbols.values() if known.symbol in env.assumed - assumed)
    larger = [Relation("<=", 2, known.symbol) for known in env.symbols.values() if known.symbol.name in more]
    return (*learnt, *(Guard("SIZE", FunctionSource(), (relation, sources), SMALL_SIZES) for relation in larger))
