"""The compiled halves of a graph, and one call of them: what the forward remembers for the backward, and how the
backward runs.

Takes compiled callables over flat tensors; gives functions that the autograd functions around them share (function.py,
visits.py).
Always holds: gradients of gradients are right (PyTorch's own autograd over the recorded operators), or refused; what is
saved is freed with its last use unless the graph is kept, and a write to it in between is an error, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

from fusewright.autograd import buckets
from fusewright.base.errors import RuntimeFallback
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.graph.generators import Drawn, states_of

MOST_NODES = 8
"""Outputs with a node each, as long as no input has a hook: a model that returns a cache has two outputs for each
layer."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_PLAIN = (torch.Tensor, torch.nn.Parameter)

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a "
    "compiled function was written to before gradients of its gradients were asked for"
)
ASKED = (
    "fusewright: an input of a compiled function requires a gradient, or requires none any more, since after the call: "
    "gradients of its gradients (create_graph=True) would be those of another call. Set requires_grad before the call."
)
READ = "what a custom autograd.Function or a hook looks up in the backward is no longer what it was in the forward"
FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


@dataclass(frozen=True, slots=True)
class Reach:
    """Inputs that the same outputs lead to.

    inputs     their positions (~n: output n of another group)
    gradients  for each its place among the group's gradients, or -1: it gets none
    depends    the outputs, by their places among the group's tangents
    beyond     places (among the group's) of reaches that stand before this one: whatever leads here leads there, too
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    depends: tuple[int, ...]
    beyond: tuple[int, ...] = ()

    def reached_by(self, given: Sequence[Any]) -> bool:
        """Whether any of the outputs has a gradient."""
        return any(given[place] is not None for place in self.depends)


@dataclass(frozen=True, slots=True)
class Branch:
    """What the backward computes from zeros alone, by factors that may be infinite or NaN, if the outputs of `tangents`
    (by place) have no gradient. `shown`: gradients (by place) one of which then is not finite, if a factor was not.
    from_zeros: the program's own code is among it, and may make of zeros something else."""

    tangents: frozenset[int]
    shown: tuple[int, ...]
    from_zeros: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Outputs that share operators, and their backward: backward(saved..., tangents...) → gradients.

    saved      see autograd.joint.Split
    tangents   positions of the outputs; row_major: which of their gradients are so, whatever the output is (see
        Backward)
    gradients  which inputs get a gradient, in order; constant: whether it reads no tangent; reads: the outputs (places
        among the tangents) that it has any part of
    foreign    positions of results that are saved and belong to another node of autograd's graph
    reaches    the inputs by the outputs that lead to them, those that most outputs lead to first
    frees      the outputs (places among the tangents) that free what each other's backward needs
    unseen     whether all inputs are leaves, and no output is given a hook by the call itself
    exits      the outputs by the operator that made them, and the reaches that they lead to (but for those beyond
               others): hooks of an output are called when its operator's turn comes
    branches   what is computed from zeros alone where outputs have no gradient (autograd.joint.unfinished_branches)
    without    the backward of those whose tangents (by place) are missing, slower and without these branches
    """

    backward: Callable[..., tuple[Any, ...]]
    saved: tuple[int, ...]
    tangents: tuple[int, ...]
    row_major: tuple[bool, ...]
    gradients: tuple[int, ...]
    constant: tuple[bool, ...]
    reads: tuple[tuple[int, ...], ...]
    foreign: frozenset[int]
    reaches: tuple[Reach, ...]
    frees: tuple[tuple[int, ...], ...]
    unseen: bool
    exits: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    branches: tuple[Branch, ...] = ()
    without: Callable[[frozenset[int]], Callable[..., tuple[Any, ...]]] | None = None

    @property
    def single(self) -> bool:
        """Whether one node of autograd's graph can stand for the group."""
        return len(self.exits) == 1 and len(self.reaches) <= 1

    def gives(self, place: int, given: Sequence[Any]) -> bool:
        """Whether there is such a gradient (-1: never), where outputs have these."""
        return place >= 0 and any(given[output] is not None for output in self.reads[place])

    @property
    def many(self) -> bool:
        """Whether nodes for all outputs are so many that they are made only where somebody may look at them."""
        return len(self.exits) > MOST_NODES and len(self.frees) == 1 and self.unseen


class Replay(Protocol):
    """What runs the recorded forward operators with autograd alive: inputs → those outputs that have gradients (None
    for others). before: what inputs (by place) held that the call has written to since, and the version that it left
    them with. known: outputs (by position) that are not to be computed."""

    def __call__(
        self, values: tuple[Any, ...], before: dict[int, tuple[Any, int | None]], known: dict[int, Any]
    ) -> tuple[Any, ...]: ...

    def needed(self) -> frozenset[int]:
        """The inputs, by place, that these outputs depend on."""

    def changed(self) -> frozenset[int]:
        """The inputs, by place, that the operators write to, and what they held before counts."""


@dataclass(frozen=True, slots=True)
class Halves:
    """forward(*inputs) → (graph outputs..., further saved values...), and the backward in groups.

    replay    runs the recorded forward operators with autograd alive: (*inputs) → graph outputs; None when that would
              not give their gradients (a custom autograd function or a hook that cannot be run again)
    random    the random generators that the forward draws from (graph.generators)
    required  the inputs, by place, that require a gradient in the forward
    updates   some inputs take new values after the graph: they are not held then (they would hold themselves alive),
        and not replayed
    outputs   number of graph outputs
    parts     the backward of the one group in several parts (see autograd.buckets); empty: in one
    graphs    what runs the forward and the backward of the one group instead of themselves, if anything does
    before    (input, result of the forward): what the input held before the call, which writes to it and whose replay
        reads it
    as_read   whether what the program's own code looks up in the backward is what it was; None: it looks up nothing
    fell_back is told why when the compiled backward could not finish and the recorded operators ran instead
    """

    forward: Callable[..., tuple[Any, ...]]
    groups: tuple[Group, ...]
    replay: Replay | None
    random: tuple[Drawn, ...]
    required: frozenset[int]
    updates: bool
    outputs: int
    fell_back: Callable[[str], None]
    before: tuple[tuple[int, int], ...] = ()
    as_read: Callable[[], bool] | None = None
    parts: tuple[buckets.CompiledPart, ...] = ()
    graphs: Graphs | None = None


class Graphs(Protocol):
    """Both halves, replayed from recordings where that is possible (runtime/training_graphs.py). A lease stands for a
    forward that was."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]: ...

    def saved_by(self, lease: Any, values: Sequence[Any]) -> None: ...

    def backward(self, lease: Any, values: list[Any]) -> tuple[Any, ...]: ...

    def finished(self, lease: Any, kept: bool) -> None: ...


class Call:
    """One run of the forward: its inputs and results, the random state before it, and its lease."""

    __slots__ = ("inputs", "lease", "random", "results")

    def __init__(self, halves: Halves, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs
        self.random = states_of(halves.random) if halves.random else None
        self.lease: Any = None
        try:
            if halves.graphs is None:
                self.results = halves.forward(*inputs)
            else:
                self.results, self.lease = halves.graphs.forward(inputs)
        except RuntimeFallback:  # the call that repeats it draws the same numbers
            if self.random is not None:
                self.random.restore()
            raise

    def value(self, position: int) -> Any:
        """An input, or (~n) an output as its group has made it."""
        return self.inputs[position] if position >= 0 else self.results[~position]


def remember(ctx: Any, halves: Halves, group: Group, call: Call) -> None:
    """Keeps on the context of an autograd function what the backward of `group` needs."""
    inputs, results = call.inputs, call.results
    saved = [inputs[place] if place >= 0 else results[~place] for place in group.saved]
    # An alias without history: nodes that hold each other's outputs would never be freed; and of a view of an output
    # PyTorch asks the history before it asks whether it was written to, and says that no_grad has made it.
    saved = [
        value.detach() if place < 0 and (~place in group.foreign or _is_view(value)) else value
        for place, value in zip(group.saved, saved)
    ]
    ctx.halves, ctx.group, ctx.random, ctx.lease = halves, group, call.random, call.lease
    ctx.outputs = {place: (results[~place], results[~place]._version) for place in group.gradients if place < 0}
    ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in saved]
    ctx.layouts = [_layout(results[place], row_major) for place, row_major in zip(group.tangents, group.row_major)]
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    ctx.saved_layouts = [_stored(value) for value in saved] if hooked else None
    if halves.before:
        inputs = (*inputs, *[results[place] for _, place in halves.before])
    ctx.inputs = None if halves.updates else inputs
    ctx.versions = [] if halves.updates else _versions(inputs)
    ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
    if halves.graphs is not None and ctx.lease is not None:
        halves.graphs.saved_by(ctx.lease, saved)
    ctx.set_materialize_grads(False)


def restore(ctx: Any, halves: Halves, group: Group, call: Any) -> None:
    """`remember` of a forward that ran natively (`call`: a ForwardCall of csrc/forward_call.cpp)."""
    ctx.halves, ctx.group, ctx.random, ctx.lease = halves, group, call.random, None
    ctx.plain = call.plain or [None] * len(group.saved)
    ctx.layouts, ctx.saved_layouts, ctx.outputs = call.layouts, None, {}
    ctx.inputs, ctx.versions = call.inputs, list(call.versions)


def values_for(ctx: Any, given: list[torch.Tensor | None]) -> list[Any]:
    """What the compiled backward takes: the saved values, as they were (a saved-tensor hook may have put another tensor
    in a saved one's place), and the tangents."""
    values = [tensor if plain is None else plain for tensor, plain in zip(ctx.saved_tensors, ctx.plain)]
    if ctx.saved_layouts is not None:
        values = [
            value if layout is None else laid_out(value, layout) for value, layout in zip(values, ctx.saved_layouts)
        ]
    return values + [tangent(one, layout) for one, layout in zip(given, ctx.layouts)]


def gradients(ctx: Any, given: list[torch.Tensor | None], last: bool = True) -> Sequence[Any]:
    """The gradients of the context's group. `last`: unless the graph is kept, what is saved is freed."""
    if torch.is_grad_enabled():
        return replayed_gradients(ctx, given)
    halves: Halves = ctx.halves
    if halves.as_read is not None and not halves.as_read():
        return repeated(ctx, given, RuntimeFallback(READ), last)
    values = values_for(ctx, given)
    if last:
        ctx.maybe_clear_saved_tensors()  # each saved tensor is freed after its last use in the backward
    missing = frozenset(place for place, one in enumerate(given) if one is None)
    zeros = multiplied_zeros(ctx, missing) if missing else set()
    if (zeros and not _repeatable(ctx)) or (missing and made_of_zeros(ctx, missing)):
        assert ctx.group.without is not None
        return _finished(ctx, ctx.group.without(missing)(*values), last)
    try:
        results = _run(halves, ctx, values)
    except RuntimeFallback as error:
        return repeated(ctx, given, error, last)
    if not _are_finite([results[place] for place in zeros]):
        with torch.enable_grad():
            results = replayed_gradients(ctx, given, create_graph=False)
    return _finished(ctx, results, last)


def repeated(ctx: Any, given: list[torch.Tensor | None], error: BaseException, last: bool = True) -> Sequence[Any]:
    """The gradients, by the recorded operators, where the compiled backward could not finish. Other errors are
    raised."""
    if not isinstance(error, RuntimeFallback):
        raise error
    ctx.halves.fell_back(str(error))
    with torch.enable_grad():
        results = replayed_gradients(ctx, given, create_graph=False)
    return _finished(ctx, results, last)


def _finished(ctx: Any, results: Sequence[Any], last: bool) -> Sequence[Any]:
    halves: Halves = ctx.halves
    kept = not last or torch._C._autograd._get_current_graph_task_keep_graph()
    if not kept:
        ctx.inputs, ctx.outputs = None, {}
    if halves.graphs is not None and ctx.lease is not None:
        halves.graphs.finished(ctx.lease, kept)
    return results


def multiplied_zeros(ctx: Any, missing: frozenset[int]) -> set[int]:
    """The gradients (by place) that show whether the compiled backward has multiplied zeros, taken for outputs that
    nothing depends on, by what is not finite: zero times infinity is no number, and eager leaves it out."""
    branches: tuple[Branch, ...] = ctx.group.branches
    return {place for branch in branches if branch.tangents <= missing for place in branch.shown}


def made_of_zeros(ctx: Any, missing: frozenset[int]) -> bool:
    """Whether the compiled backward runs code of the program's on zeros, which eager would not run."""
    branches: tuple[Branch, ...] = ctx.group.branches
    return any(branch.from_zeros and branch.tangents <= missing for branch in branches)


def _repeatable(ctx: Any) -> bool:
    """Whether the recorded forward can run once more, with the inputs and the random numbers that it had."""
    halves: Halves = ctx.halves
    if halves.replay is None or ctx.inputs is None or not _unwritten(ctx):
        return False
    return not halves.random or ctx.random is not None


def _are_finite(gradients: list[Any]) -> bool:
    """Whether all elements are. A sum is, of finite elements, unless it overflows: one pass, and one wait for a GPU."""
    tensors = [one for one in gradients if isinstance(one, torch.Tensor)]
    if not tensors or bool(torch.stack([one.sum().isfinite() for one in tensors]).all()):
        return True
    return all(bool(one.isfinite().all()) for one in tensors)


def _run(halves: Halves, ctx: Any, values: list[Any]) -> tuple[Any, ...]:
    if halves.graphs is not None:
        return halves.graphs.backward(ctx.lease, values)
    consume = getattr(ctx.group.backward, "consume", None)
    return consume(values) if consume is not None else ctx.group.backward(*values)  # type: ignore[no-any-return]


def _layout(tensor: torch.Tensor, row_major: bool) -> Layout:
    """How the gradient of an output is laid out: `Recorder.tangent` says the same."""
    stride = torch.empty(tensor.shape, device="meta").stride() if row_major else tensor.stride()
    return tensor.shape, stride, tensor.dtype, tensor.device


def _is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value._is_view()


def _stored(value: Any) -> Layout | None:
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """How often each input tensor has been written to (inference tensors do not count)."""
    try:
        return [value._version for value in inputs if isinstance(value, torch.Tensor)]
    except RuntimeError:  # an inference tensor has none, nor has one that was until `.data =` gave it another's
        counts = []
        for value in inputs:
            with suppress(RuntimeError):
                counts += [value._version] if isinstance(value, torch.Tensor) else []
        return counts


def _unwritten(ctx: Any) -> bool:
    """Whether what the results depend on is there as it was: no input has been written to since the forward, and what
    the forward has written to is kept."""
    kept = {place for place, _ in ctx.halves.before}
    if not kept.issuperset(ctx.halves.replay.changed()):
        return False
    if any(output._version != version for output, version in ctx.outputs.values()):
        return False
    found = _versions(ctx.inputs)
    if found == ctx.versions:
        return True
    places = _tensors(ctx.inputs)
    if not len(places) == len(found) == len(ctx.versions):
        return False
    needed = ctx.halves.replay.needed() - kept
    return all(place not in needed for place, *versions in zip(places, found, ctx.versions) if len({*versions}) > 1)


def _read(ctx: Any) -> list[int]:
    """The input tensors, by place, that the results depend on."""
    needed = ctx.halves.replay.needed()
    return [place for place in _tensors(ctx.inputs) if place in needed]


def _tensors(inputs: tuple[Any, ...]) -> list[int]:
    return [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]


def _replayed(ctx: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Aliases of what the group's gradients belong to, and the outputs that the recorded operators compute of them."""
    halves: Halves = ctx.halves
    first = len(ctx.inputs) - len(halves.before)
    # Aliases stand for the inputs, whose hooks are called when the gradients of the gradients reach them.
    # A view of the same sizes would take another step for a dimension of one element, and operators another format.
    alias, inputs = torch.ops.aten.alias.default, ctx.inputs[:first]
    inputs = tuple([alias(one) if isinstance(one, torch.Tensor) and one.requires_grad else one for one in inputs])
    known = {~place: alias(output) for place, (output, _) in ctx.outputs.items()}
    wanted = [inputs[place] if place >= 0 else known[~place] for place in ctx.group.gradients]
    places = _tensors(ctx.inputs)
    versions = dict(zip(places, ctx.versions)) if len(places) == len(ctx.versions) else {}
    before = {place: (ctx.inputs[first + at], versions.get(place)) for at, (place, _) in enumerate(halves.before)}
    counted = tuple(inputs[place] for place, (_, version) in before.items() if version is not None)
    now = tuple(one._version for one in counted)
    try:
        with nullcontext() if ctx.random is None else ctx.random.again():
            return wanted, halves.replay(inputs, before, known)  # type: ignore[misc]
    finally:
        if counted:
            torch._C._autograd._unsafe_set_version_counter(counted, now)


def tangent(given: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """The tangent in the output's own layout, which the backward was compiled for; zeros for an output that nothing
    depended on."""
    if given is None:
        shape, stride, dtype, device = layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    return laid_out(given, layout)


_BATCHED = torch._C._dispatch_key_parse("Batched")  # what torch.autograd.grad(is_grads_batched=True) gives


def laid_out(given: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`given`, or a plain tensor of this layout with its elements. Raises RuntimeError where the shape does not fit."""
    if given.layout is not torch.strided:
        given = given.to_dense()
    plain = type(given) in _PLAIN and not (given.is_conj() or given.is_neg() or given._is_zerotensor())
    if plain and (given.shape, given.stride(), given.dtype, given.device) == layout:
        return given
    shape, stride, dtype, device = layout
    if torch._C._dispatch_keys(given).has(_BATCHED):
        return given  # many at once: the compiled backward leaves it to the recorded operators
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if torch._debug_has_internal_overlap(made) != 1:
        return made.copy_(given)
    # What was expanded: equal elements are written to one place, which `copy_` refuses.
    memory = torch.empty(made.untyped_storage().nbytes() // dtype.itemsize, dtype=dtype, device=device)
    places = torch.arange(memory.numel(), device=device).as_strided(shape, stride)
    return memory.put_(places, given.to(memory)).as_strided(shape, stride)


def replayed_gradients(ctx: Any, given: list[torch.Tensor | None], create_graph: bool = True) -> tuple[Any, ...]:
    """Gradients with a graph of their own: the recorded operators run once more under autograd."""
    halves: Halves = ctx.halves
    group: Group = ctx.group
    if halves.replay is None and not create_graph:
        raise RuntimeError(
            "fusewright: the compiled backward could not finish, and cannot be repeated eagerly because of a custom "
            "autograd.Function or a tensor hook in the compiled function that cannot be run again. Keep that out of "
            "the compiled function."
        )
    if halves.replay is None:
        raise RuntimeError(
            "fusewright: gradients of gradients (create_graph=True) need a custom autograd.Function or a tensor hook "
            "of the compiled function once more, and it cannot be run again: it has side effects, holds or takes "
            "what may change, or writes to an argument. Keep it out of the compiled function, or compile "
            "with fusewright.disable around it."
        )
    inputs = ctx.inputs
    if halves.updates or (inputs is not None and not _unwritten(ctx)):
        raise RuntimeError(CHANGED)
    if inputs is None:
        raise RuntimeError(FREED)
    if halves.random and ctx.random is None:
        raise RuntimeError(
            "fusewright: the forward drew random numbers while the program recorded a CUDA graph; it cannot be "
            "repeated with them. Keep gradients of gradients (create_graph=True) of it out of the recording."
        )
    if create_graph and any(inputs[place].requires_grad != (place in halves.required) for place in _read(ctx)):
        raise RuntimeError(ASKED)
    wanted, outputs = _replayed(ctx)
    arriving = [(place, outputs[group.tangents[place]], one) for place, one in enumerate(given) if one is not None]
    hidden = {place for place, output, _ in arriving if not output.requires_grad}
    pairs = [(output, tangent) for place, output, tangent in arriving if place not in hidden]
    found: Sequence[Any] = [None] * len(wanted)
    if pairs and wanted:
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [tangent for _, tangent in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    expected = [place for place in range(len(wanted)) if group.gives(place, given) and not group.constant[place]]
    if any(found[place] is None or not hidden.isdisjoint(group.reads[place]) for place in expected):
        raise RuntimeError(
            "fusewright: gradients of gradients (create_graph=True) of this compiled function cannot be computed: "
            "an operator inside hides its gradient from PyTorch's autograd. Keep it out of the compiled function, or "
            "compile with fusewright.disable around it."
        )
    # The capture's gradient is a constant, where the operators that run again lead nowhere: zeros.
    return tuple(torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(wanted, found))
