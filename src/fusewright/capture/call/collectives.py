"""Calls of torch.distributed as operators of the graph, `_c10d_functional`, and a copy into what the call writes to.

Takes the arguments of a call of `torch.distributed`; gives what the call gives. Always holds: a process group is
guarded by identity, so its name, ranks and size are constants; a collective begins where the program says and is waited
for where the program does; one that nobody waits for in the graph begins in eager code, or under fullgraph is waited
for at the graph's end; whatever the operators do not express (a tensor that requires a gradient, other reductions,
unequal tensors in a list) is the graph break "distributed-call".
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak, Retry, UserException
from fusewright.capture.border.native import native
from fusewright.operators import messages

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Row = Callable[["Tracer", Args, Kwargs], Any]

C10D = "torch.distributed.distributed_c10d"
WITH_GRADIENTS = "torch.distributed.nn.functional"
AVAILABLE = torch.distributed.is_available()
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Work:
    """What an asynchronous call gives. Where eager code meets one, the graph that began it has waited for it."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: what a graph under fullgraph began can only be waited for")


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


def _asynchronous(tracer: Tracer) -> None:
    if not tracer.assumptions.works:
        raise _refuse("a call that goes on after the graph, or of which more is asked than wait(),")


def _later(tracer: Tracer, given: Kwargs, started: Any, end: Ends, paired: bool = False) -> Any:
    """Waits for the collective and does `end` with its result: now, or when the program waits. paired: a message, for
    whose other side a wait at another place than the program's might wait for ever."""

    def finish() -> None:
        end(_begin(tracer, "wait_tensor", started))

    if not given.get("async_op"):
        finish()
        return None
    _asynchronous(tracer)
    work = Work()
    tracer.recorder.collectives.append((work, finish, paired))
    return work


def _into(tracer: Tracer, target: Any) -> Ends:
    return lambda result: tracer.world.torch_call(torch._C.TensorBase.copy_, (target, result), {})


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
        parts = tracer.world.torch_call(methods.split, (result, tensor.shape[0]), {})
        for target, part in zip(targets, parts, strict=True):
            tracer.world.torch_call(torch._C.TensorBase.copy_, (target, part), {})

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


def _peer(group: Any, given: Kwargs, kind: str, name: str) -> int:
    """A rank of the group, given as such or as a rank of all processes; kind: "src" or "dst"."""
    everywhere, of_group = given.get(kind), given.get(f"group_{kind}")
    if (everywhere is None) == (of_group is None) and name not in ("reduce", "gather", "scatter"):
        raise _refuse(f"{name} without one {kind}")
    if of_group is None:
        of_group = native(torch.distributed.get_group_rank, group, 0 if everywhere is None else everywhere)
    return int(of_group)


def _reduce(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "reduce")
    target = _peer(group, given, "dst", "reduce")
    started = _message(tracer, "reduce", tensor, _reduction(given["op"]), target, group.group_name)
    return _later(tracer, given, started, _into(tracer, tensor))


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


def _gather(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "gather")
    target = _peer(group, given, "dst", "gather")
    count = group.size() if group.rank() == target else 0
    into = _like(tracer, given["gather_list"], tensor, count, "gather")
    started = _message(tracer, "gather", tensor, target, count, group.group_name)

    def end(result: Any) -> None:
        for place, one in enumerate(into):
            _into(tracer, one)(tracer.world.torch_call(torch._C.TensorBase.select, (result, 0, place), {}))

    return _later(tracer, given, started, end)


def _scatter(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "scatter")
    source = _peer(group, given, "src", "scatter")
    parts = _like(tracer, given["scatter_list"], tensor, group.size() if group.rank() == source else 0, "scatter")
    call = tracer.world.torch_call
    given_parts = call(torch.stack, (parts,), {}) if parts else call(torch._C.TensorBase.new_empty, (tensor, (0,)), {})
    started = _message(tracer, "scatter", given_parts, source, list(tensor.shape), group.group_name)
    return _later(tracer, given, started, _into(tracer, tensor))


def _nothing(result: Any) -> None:
    """What is done with a result that only says that something has ended."""


def _isend(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "isend")
    target = _peer(group, given, "dst", "isend")
    started = _message(tracer, "send", tensor, target, given["tag"], group.group_name)
    return _later(tracer, {"async_op": True} | given, started, _nothing, True)


def _irecv(tracer: Tracer, given: Kwargs) -> Any:
    group, tensor = _group(tracer, given["group"]), _plain(given["tensor"], "irecv")
    source = _peer(group, given, "src", "irecv")
    started = _message(tracer, "receive", tensor, source, given["tag"], group.group_name)
    return _later(tracer, {"async_op": True} | given, started, _into(tracer, tensor), True)


def _send(tracer: Tracer, given: Kwargs) -> None:
    group = _group(tracer, given["group"])
    if _peer(group, given, "dst", "send") == group.rank():
        raise _refuse("send to the process itself")
    _isend(tracer, given | {"async_op": False})


def _recv(tracer: Tracer, given: Kwargs) -> int:
    group = _group(tracer, given["group"])
    source = _peer(group, given, "src", "recv")
    _irecv(tracer, given | {"async_op": False})
    return int(native(torch.distributed.get_global_rank, group, source))


def _batch_isend_irecv(tracer: Tracer, given: Kwargs) -> Any:
    """One operator, since a GPU's backend must be told of all messages together."""
    _asynchronous(tracer)
    batch = list(tracer.world.materialise(given["p2p_op_list"]))
    if not batch or any(type(one) is not torch.distributed.P2POp for one in batch):
        raise _refuse("batch_isend_irecv of something else than P2POps")
    read = functools.partial(_attribute, tracer)
    groups = [_group(tracer, read(one, "group")) for one in batch]
    if any(group is not groups[0] for group in groups):
        raise _refuse("batch_isend_irecv over several groups")
    kinds = [read(one, "op").__name__ for one in batch]
    tensors = [_plain(read(one, "tensor"), "batch_isend_irecv") for one in batch]
    peers, tags = ([read(one, name) for one in batch] for name in ("group_peer", "tag"))
    started = _message(tracer, "exchange", tensors, kinds, peers, tags, groups[0].group_name)
    return [
        _later(tracer, {"async_op": True}, result, _nothing if kind == "isend" else _into(tracer, tensor), True)
        for kind, tensor, result in zip(kinds, tensors, started, strict=True)
    ]


def _attribute(tracer: Tracer, owner: Any, name: str) -> Any:
    return tracer.call(getattr, (owner, name), {})


def _barrier(tracer: Tracer, given: Kwargs) -> Any:
    group = _group(tracer, given["group"])
    if given.get("timeout") is not None or tracer.world.effects.calls:
        raise _refuse("barrier with a timeout, or behind output that is shown after the graph")
    token = tracer.world.torch_call(torch.empty, (0,), {})
    ids = given.get("device_ids")
    devices = [] if ids is None else list(tracer.world.materialise(ids))
    return _later(tracer, given, _message(tracer, "barrier", token, devices, group.group_name), _nothing)


def _reduce_scatter(tracer: Tracer, given: Kwargs) -> Any:
    """A list of tensors that are all like the result."""
    group, output = _group(tracer, given["group"]), _plain(given["output"], "reduce_scatter")
    parts = _like(tracer, given["input_list"], output, group.size(), "reduce_scatter")
    whole = tracer.world.torch_call(torch.stack, (parts,), {})
    started = _begin(
        tracer, "reduce_scatter_tensor", whole, _reduction(given["op"]), group.size(), group.group_name
    )

    def end(result: Any) -> None:
        _into(tracer, output)(tracer.world.torch_call(torch._C.TensorBase.select, (result, 0, 0), {}))

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
    line = call(torch.cat, ([call(torch._C.TensorBase.flatten, (one,), {}) for one in parts],), {})
    sizes = [one.numel() for one in targets]
    started = _begin(tracer, "all_to_all_single", line, sizes, [one.numel() for one in parts], group.group_name)

    def end(result: Any) -> None:
        for target, part in zip(targets, call(torch.split, (result, sizes), {}), strict=True):
            _into(tracer, target)(call(torch._C.TensorBase.view, (part, target.shape), {}))

    return _later(tracer, given, started, end)


def finish_collectives(tracer: Tracer, work: object = None) -> None:
    """Waits for the collective of `work`, or at a graph's end for all that the program has not waited for. Raises Retry
    for those that eager code waits for."""
    pending = tracer.recorder.collectives
    if work is None and any(paired or not tracer.options.fullgraph for _, _, paired in pending):
        raise Retry(works=False)
    for one in [entry for entry in pending if work is None or entry[0] is work]:
        pending.remove(one)
        one[1]()


def _wait(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    if len(args) + len(kwargs) > 1:
        raise _refuse("a wait with a timeout")
    finish_collectives(tracer, args[0])
    return True


def _more_of_work(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """More of PyTorch's class than ours has: such a program has its work from eager code."""
    raise UserException(AttributeError(args[1])) if args[1].startswith("__") else Retry(works=False)


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


def _by_ranks(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """The group of a tag and ranks, or None; a guard asks again."""
    given = _bound("_find_pg_by_ranks_and_tag", args, kwargs)
    question = (given["tag"], tuple(tracer.world.materialise(given["ranks"])))
    find = sys.modules[C10D]._find_pg_by_ranks_and_tag
    found = native(find, *question)
    tracer.world.guard_answer(find, question, found, identical=True)
    return found


def _size_by_name(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    (group,) = (*args, *kwargs.values())
    return (_by_name(tracer, (group,), {}) if isinstance(group, str) else _group(tracer, group)).size()


def _name_of(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    (group,) = (*args, *kwargs.values())
    return group if isinstance(group, str) else _group(tracer, group).group_name


def _applied(name: str, function: str, parameters: str) -> Row:
    """A function of torch.distributed.nn.functional, which refuses compilers: it applies an autograd function."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        module = cast(Any, sys.modules[WITH_GRADIENTS])
        found = inspect.signature(getattr(module, name)).bind(*args, **kwargs)
        found.apply_defaults()
        given: list[Any] = []
        for one in parameters.split():
            value = found.arguments[one.lstrip("*")]
            given += tracer.world.materialise(value) if one.startswith("*") else [value]
        return tracer.call(getattr(module, function).apply, tuple(given), {})

    return call


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
    "isend": _isend,
    "irecv": _irecv,
    "batch_isend_irecv": _batch_isend_irecv,
    "barrier": _barrier,
}
_QUESTIONS = (
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_group_rank",
    "get_global_rank",
    "get_process_group_ranks",
    "_get_group_tag",
    "_get_process_group_name",
)
_BY_FUNCTION: dict[str, Row] = {
    **{name: _call(name, function) for name, function in _COLLECTIVES.items()},
    **{name: _of_group(name) for name in _QUESTIONS},
    "_get_group_size_by_name": _size_by_name,
    "_resolve_process_group": _by_name,
    "_find_pg_by_ranks_and_tag": _by_ranks,
    "_get_default_group": _interpreted(lambda c10d: c10d._get_default_group),
}
# By function of torch.distributed.nn.functional: the autograd function, and what of its arguments that takes, in order.
_APPLIED = {
    "all_reduce": ("_AllReduce", "op group tensor"),
    "broadcast": ("_Broadcast", "src group tensor"),
    "gather": ("_Gather", "dst group tensor"),
    "scatter": ("_Scatter", "src group *tensors"),
    "reduce": ("_Reduce", "dst op group tensor"),
    "reduce_scatter": ("_Reduce_Scatter", "op group output *input_list"),
    "all_gather": ("_AllGather", "group tensor"),
    "_all_gather_base": ("_AllGatherBase", "output_tensor input_tensor group"),
    "all_to_all": ("_AlltoAll", "group output_tensor_list *input_tensor_list"),
    "all_to_all_single": ("_AlltoAllSingle", "group output output_split_sizes input_split_sizes input"),
}
# What other functions call, and P2POp's constructor, in one version of PyTorch or another: they are interpreted.
_HELPERS = (
    "P2POp.__new__",
    "P2POp.__init__",
    "_check_op",
    "_check_single_tensor",
    "_canonicalize_group_rank",
    "_group_or_default_group",
    "_rank_not_in_group",
    "_find_or_create_pg_by_ranks_and_tag",
)
# A function of the first module may be wrapped by the second, which logs its errors.
NAMED_ROWS: dict[tuple[str, str], Row] = {
    **{(home, name): row for name, row in _BY_FUNCTION.items() for home in (C10D, "torch.distributed.c10d_logger")},
    # Whether there is a process group is a question that guards answer: a global that these three read.
    **{(C10D, name): _interpreted(operator.attrgetter(name)) for name in _HELPERS},
    (C10D, "is_initialized"): _interpreted(lambda c10d: c10d.is_initialized),
    (C10D, "_WorldMeta.WORLD"): _interpreted(lambda c10d: vars(c10d._WorldMeta)["WORLD"].fget),
    (C10D, "_World.default_pg"): _interpreted(lambda c10d: vars(c10d._World)["default_pg"].fget),
    ("torch.distributed._functional_collectives", "_group_or_group_name"): _name_of,
    **{(WITH_GRADIENTS, name): _applied(name, *row) for name, row in _APPLIED.items()},
    ("torch.distributed.tensor.parallel.loss", "_enable_custom_loss_ops"): _loss_parallel,
    ("torch.utils._config_module", "ConfigModule.__getattr__"): _setting,
    (__name__, "Work.wait"): _wait,
    (__name__, "Work.is_completed"): _wait,
    (__name__, "Work.__getattr__"): _more_of_work,
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
