"""Calls of torch.distributed as operators of the graph, `_c10d_functional`, and a copy into what the call writes to.

Takes the arguments of a call of `torch.distributed`; gives what the call gives. Always holds: a process group is
guarded by identity, so its name, ranks and size are constants; a collective begins where the program says and is waited
for where the program does, at the latest at the graph's end; whatever the operators do not express (a tensor that
requires a gradient, other reductions, unequal tensors in a list) is the graph break "distributed-call".
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import native
from fusewright.operators import messages

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]

C10D = "torch.distributed.distributed_c10d"
AVAILABLE = torch.distributed.is_available()
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Work:
    """What an asynchronous call gives. Where eager code meets one, the graph that began it has waited for it."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _refuse(what: str) -> GraphBreak:
    return GraphBreak("distributed-call", what)


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(sys.modules[C10D], name))


def _bound(name: str, args: Args, kwargs: Kwargs) -> Kwargs:
    try:
        found = _signature(name).bind(*args, **kwargs)
    except TypeError:
        raise _refuse(f"{name} with other arguments than it takes") from None
    found.apply_defaults()
    return dict(found.arguments)


def _group(tracer: Tracer, given: Any) -> Any:
    """The process group of a call: by default the process's, whose identity is guarded where it is read."""
    c10d = cast(Any, sys.modules[C10D])
    group = tracer.inline(c10d._get_default_group, (), {}) if given is None else given
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise _refuse("a group that this process is no member of")
    return group


def _begin(tracer: Tracer, name: str, *args: Any) -> Any:
    return tracer.world.torch_call(getattr(torch.ops._c10d_functional, name).default, args, {})


def _plain(tensor: Any, what: str) -> Any:
    """A tensor as the collective reads or writes it: autograd has no part in these calls."""
    if not isinstance(tensor, torch.Tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
        raise _refuse(f"{what} of a tensor that requires a gradient, which eager code ignores")
    if tensor.is_complex() or not tensor.is_contiguous():
        raise _refuse(f"{what} of a tensor that is complex or not contiguous")
    return tensor


def _same(one: Any, other: Any, factor: int, what: str) -> None:
    """The first size of `one` is `factor` times that of `other`, and the rest alike."""
    fits = one.ndim == other.ndim and one.dtype is other.dtype
    fits = fits and (not one.ndim or one.shape[0] == other.shape[0] * factor) and one.shape[1:] == other.shape[1:]
    if not fits or (not one.ndim and factor != 1):
        raise _refuse(f"{what} of tensors that do not fit each other")


def _reduction(op: Any) -> str:
    op_type = getattr(op, "op", op) if type(op) is torch.distributed.ReduceOp else op
    for name in _REDUCTIONS:
        if op_type == getattr(torch.distributed.ReduceOp, name):
            return name.lower()
    raise _refuse("a reduction with a factor")


Ends = Callable[[Any], None]


def _later(tracer: Tracer, given: Kwargs, started: Any, end: Ends) -> Any:
    """Waits for the collective and does `end` with its result: now, or when the program waits."""

    def finish() -> None:
        end(_begin(tracer, "wait_tensor", started))

    if not given.get("async_op"):
        finish()
        return None
    work = Work()
    tracer.recorder.collectives.append((work, finish))
    return work


def _into(tracer: Tracer, target: Any) -> Ends:
    return lambda result: tracer.world.torch_call(torch.Tensor.copy_, (target, result), {})


def _all_reduce(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "all_reduce")
    started = _begin(tracer, "all_reduce", tensor, _reduction(given["op"]), group.group_name)
    return _later(tracer, given, started, _into(tracer, tensor))


def _broadcast(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "broadcast")
    source, of_group = given["src"], given.get("group_src")
    if of_group is None:
        of_group = native(torch.distributed.get_group_rank, group, source)
    elif source is not None:
        raise _refuse("broadcast with two sources")
    started = _begin(tracer, "broadcast", tensor, of_group, group.group_name)
    return _later(tracer, given, started, _into(tracer, tensor))


def _all_gather_into_tensor(tracer: Tracer, given: Kwargs) -> Any:
    output, tensor = (_plain(value, "all_gather_into_tensor") for value in list(given.values())[:2])
    group = _group(tracer, given["group"])
    _same(output, tensor, group.size(), "all_gather_into_tensor")
    started = _begin(tracer, "all_gather_into_tensor", tensor, group.size(), group.group_name)
    return _later(tracer, given, started, _into(tracer, output))


def _all_gather(tracer: Tracer, given: Kwargs) -> Any:
    """A list of tensors that are all like the one given."""
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "all_gather")
    targets = list(tracer.world.materialise(given["tensor_list"]))
    if len(targets) != group.size() or not tensor.ndim:
        raise _refuse("all_gather of tensors that do not fit each other")
    for target in targets:
        _same(_plain(target, "all_gather"), tensor, 1, "all_gather")
    started = _begin(tracer, "all_gather_into_tensor", tensor, group.size(), group.group_name)

    def end(result: Any) -> None:
        parts = tracer.world.torch_call(torch.Tensor.split, (result, tensor.shape[0]), {})
        for target, part in zip(targets, parts, strict=True):
            tracer.world.torch_call(torch.Tensor.copy_, (target, part), {})

    return _later(tracer, given, started, end)


def _reduce_scatter_tensor(tracer: Tracer, given: Kwargs) -> Any:
    output, tensor = (_plain(value, "reduce_scatter_tensor") for value in list(given.values())[:2])
    group = _group(tracer, given["group"])
    _same(tensor, output, group.size(), "reduce_scatter_tensor")
    operation = _reduction(given["op"])
    started = _begin(tracer, "reduce_scatter_tensor", tensor, operation, group.size(), group.group_name)
    return _later(tracer, given, started, _into(tracer, output))


def _all_to_all_single(tracer: Tracer, given: Kwargs) -> Any:
    output, tensor = (_plain(given[name], "all_to_all_single") for name in ("output", "input"))
    group = _group(tracer, given["group"])
    splits = []
    for value, name in ((output, "output_split_sizes"), (tensor, "input_split_sizes")):
        sizes = given[name]
        sizes = list(tracer.world.materialise(sizes)) if sizes else [value.shape[0] // group.size()] * group.size()
        if not value.ndim or len(sizes) != group.size() or sum(sizes) != value.shape[0]:
            raise _refuse("all_to_all_single of tensors that do not fit their split sizes")
        splits.append(sizes)
    started = _begin(tracer, "all_to_all_single", tensor, *splits, group.group_name)
    return _later(tracer, given, started, _into(tracer, output))


def _message(tracer: Tracer, name: str, *args: Any) -> Any:
    return tracer.world.torch_call(getattr(getattr(torch.ops, messages.NAMESPACE), name).default, args, {})


def _synchronous(given: Kwargs, name: str) -> None:
    if given.get("async_op"):
        raise _refuse(f"{name} with async_op=True")


def _peer(group: Any, given: Kwargs, kind: str, name: str) -> int:
    """A rank of the group, given as such or as a rank of all processes; kind: "src" or "dst"."""
    everywhere, of_group = given.get(kind), given.get(f"group_{kind}")
    if (everywhere is None) == (of_group is None) and name not in ("reduce", "gather", "scatter"):
        raise _refuse(f"{name} without one {kind}")
    if of_group is None:
        of_group = native(torch.distributed.get_group_rank, group, 0 if everywhere is None else everywhere)
    return int(of_group)


def _reduce(tracer: Tracer, given: Kwargs) -> None:
    _synchronous(given, "reduce")
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "reduce")
    target = _peer(group, given, "dst", "reduce")
    made = _message(tracer, "reduce", tensor, _reduction(given["op"]), target, group.group_name)
    _into(tracer, tensor)(made)


def _like(tracer: Tracer, given: Any, tensor: Any, count: int, what: str) -> list[Any]:
    """A list of `count` tensors like `tensor`."""
    found = list(tracer.world.materialise(given)) if given is not None else []
    if len(found) != count:
        raise _refuse(f"{what} with a list of another length than the group's")
    for one in found:
        _same(_plain(one, what), tensor, 1, what)
        if one.shape != tensor.shape:
            raise _refuse(f"{what} of tensors that do not fit each other")
    return found


def _gather(tracer: Tracer, given: Kwargs) -> None:
    _synchronous(given, "gather")
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "gather")
    target = _peer(group, given, "dst", "gather")
    count = group.size() if group.rank() == target else 0
    into = _like(tracer, given["gather_list"], tensor, count, "gather")
    made = _message(tracer, "gather", tensor, target, count, group.group_name)
    for place, one in enumerate(into):
        _into(tracer, one)(tracer.world.torch_call(torch.Tensor.select, (made, 0, place), {}))


def _scatter(tracer: Tracer, given: Kwargs) -> None:
    _synchronous(given, "scatter")
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "scatter")
    source = _peer(group, given, "src", "scatter")
    parts = _like(tracer, given["scatter_list"], tensor, group.size() if group.rank() == source else 0, "scatter")
    call = tracer.world.torch_call
    given_parts = call(torch.stack, (parts,), {}) if parts else call(torch.Tensor.new_empty, (tensor, (0,)), {})
    made = _message(tracer, "scatter", given_parts, source, list(tensor.shape), group.group_name)
    _into(tracer, tensor)(made)


def _send(tracer: Tracer, given: Kwargs) -> None:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "send")
    _message(tracer, "send", tensor, _peer(group, given, "dst", "send"), given["tag"], group.group_name)


def _recv(tracer: Tracer, given: Kwargs) -> int:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "recv")
    source = _peer(group, given, "src", "recv")
    _into(tracer, tensor)(_message(tracer, "receive", tensor, source, given["tag"], group.group_name))
    return int(native(torch.distributed.get_global_rank, group, source))


def _reduce_scatter(tracer: Tracer, given: Kwargs) -> Any:
    """A list of tensors that are all like the result."""
    group, output = _group(tracer, given["group"]), _plain(given["output"], "reduce_scatter")
    parts = _like(tracer, given["input_list"], output, group.size(), "reduce_scatter")
    whole = tracer.world.torch_call(torch.stack, (parts,), {})
    started = _begin(
        tracer, "reduce_scatter_tensor", whole, _reduction(given["op"]), group.size(), group.group_name
    )

    def end(result: Any) -> None:
        _into(tracer, output)(tracer.world.torch_call(torch.Tensor.select, (result, 0, 0), {}))

    return _later(tracer, given, started, end)


def _all_to_all(tracer: Tracer, given: Kwargs) -> Any:
    """Lists of tensors, each of any shape: their elements in one line."""
    group = _group(tracer, given["group"])
    targets, parts = (
        [_plain(one, "all_to_all") for one in tracer.world.materialise(given[name])]
        for name in ("output_tensor_list", "input_tensor_list")
    )
    if len(targets) != group.size() or len(parts) != group.size() or len({one.dtype for one in targets + parts}) > 1:
        raise _refuse("all_to_all of tensors that do not fit the group")
    call = tracer.world.torch_call
    line = call(torch.cat, ([call(torch.Tensor.flatten, (one,), {}) for one in parts],), {})
    sizes = [one.numel() for one in targets]
    started = _begin(tracer, "all_to_all_single", line, sizes, [one.numel() for one in parts], group.group_name)

    def end(result: Any) -> None:
        for target, part in zip(targets, call(torch.split, (result, sizes), {}), strict=True):
            _into(tracer, target)(call(torch.Tensor.view, (part, target.shape), {}))

    return _later(tracer, given, started, end)


def finish_collectives(tracer: Tracer, work: object = None) -> None:
    """Waits for the collective of `work`, or at a graph's end for all that the program has not waited for."""
    pending = tracer.recorder.collectives
    for one in [entry for entry in pending if work is None or entry[0] is work]:
        pending.remove(one)
        one[1]()


def _wait(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    if len(args) + len(kwargs) > 1:
        raise _refuse("a wait with a timeout")
    finish_collectives(tracer, args[0])
    return True


def _call(name: str, function: Callable[[Tracer, Kwargs], Any]) -> Row:
    return lambda tracer, args, kwargs: function(tracer, _bound(name, args, kwargs))


def _of_group(name: str) -> Row:
    """A question about a group, whose answer never changes."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        given = _bound(name, args, kwargs)
        key = "group" if "group" in given else "pg"
        if isinstance(given.get(key), str):
            raise _refuse(f"{name} of a group's name")
        given[key] = _group(tracer, given.get(key))
        answer = native(getattr(sys.modules[C10D], name), **given)
        return list(answer) if isinstance(answer, list) else answer

    return call


def _by_name(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """The group of a name; a guard asks again."""
    (name,) = (*args, *kwargs.values())
    found = native(sys.modules[C10D]._resolve_process_group, name)
    tracer.world.guard_answer(sys.modules[C10D]._resolve_process_group, (name,), found, identical=True)
    return found


def _size_by_name(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    (group,) = (*args, *kwargs.values())
    return (_by_name(tracer, (group,), {}) if isinstance(group, str) else _group(tracer, group)).size()


def _name_of(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    (group,) = (*args, *kwargs.values())
    return group if isinstance(group, str) else _group(tracer, group).group_name


def _unsupported(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    raise _refuse(f"torch.distributed.nn.functional.{args[0] if args else ''}")


def _loss_parallel(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    raise _refuse("loss_parallel entered in compiled code: its backward must run inside of it, too")


def _setting(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A setting of PyTorch's (torch.distributed.config) that a context variable holds: a guard asks again."""
    answer = native(getattr, *args)
    if type(answer) not in (bool, int, str, type(None)):
        raise GraphBreak("opaque-object", f"the setting {args[1]}")
    tracer.world.guard_answer(getattr, args, answer)
    return answer


def _interpreted(find: Callable[[Any], Any]) -> Row:
    """A function of a module whose other functions are refused."""
    return lambda tracer, args, kwargs: tracer.inline(find(sys.modules[C10D]), args, kwargs)


_COLLECTIVES: dict[str, Callable[[Tracer, Kwargs], Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "_all_gather_base": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "recv": _recv,
}
_QUESTIONS = (
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
)
_BY_FUNCTION: dict[str, Row] = {
    **{name: _call(name, function) for name, function in _COLLECTIVES.items()},
    **{name: _of_group(name) for name in _QUESTIONS},
    "_get_group_size_by_name": _size_by_name,
    "_resolve_process_group": _by_name,
    "_get_default_group": _interpreted(lambda c10d: c10d._get_default_group),
}
# A function of the first module may be wrapped by the second, which logs its errors.
NAMED_ROWS: dict[tuple[str, str], Row] = {
    **{(home, name): row for name, row in _BY_FUNCTION.items() for home in (C10D, "torch.distributed.c10d_logger")},
    # Whether there is a process group is a question that guards answer: a global that these three read.
    (C10D, "is_initialized"): _interpreted(lambda c10d: c10d.is_initialized),
    (C10D, "_WorldMeta.WORLD"): _interpreted(lambda c10d: vars(c10d._WorldMeta)["WORLD"].fget),
    (C10D, "_World.default_pg"): _interpreted(lambda c10d: vars(c10d._World)["default_pg"].fget),
    ("torch.distributed._functional_collectives", "_group_or_group_name"): _name_of,
    ("torch.distributed.nn.functional", "_not_supported_under_compile"): _unsupported,
    ("torch.distributed.tensor.parallel.loss", "_enable_custom_loss_ops"): _loss_parallel,
    ("torch.utils._config_module", "ConfigModule.__getattr__"): _setting,
    (__name__, "Work.wait"): _wait,
    (__name__, "Work.is_completed"): _wait,
}


def _read(name: str) -> Row:
    return lambda tracer, args, kwargs: getattr(args[0], name)


def _asked(name: str) -> Row:
    return lambda tracer, args, kwargs: native(getattr(args[0], name), *args[1:], **kwargs)


ROWS: list[tuple[Any, Row]] = []
if AVAILABLE:
    _of_groups = vars(torch.distributed.ProcessGroup)
    ROWS = [
        *((_of_groups[name].fget, _read(name)) for name in ("group_name", "group_desc")),
        *((_of_groups[name].__func__, _asked(name)) for name in ("rank", "size")),
    ]
