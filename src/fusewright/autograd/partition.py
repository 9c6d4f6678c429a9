"""Partition: which values the forward saves for the backward, and which ones the backward computes again.

Takes a functionalised `JointGraph`; gives a `Split`. The choice is a minimum cut over bytes: every forward value may be
saved at the cost of its bytes, or recomputed from other saved values if that is cheap (pointwise operators and views),
asked for by the program (a checkpoint) or by a memory budget, and possible (nothing random, no effects). Always holds:
the backward computes what the joint graph would have; only where a value comes from differs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.autograd.joint import JointGraph, Split, backward_nodes, not_kept, output_node, results_of
from fusewright.autograd.max_flow import INFINITE, Network
from fusewright.autograd.narrow import narrow_type
from fusewright.autograd.recompute import can_recompute, elements, is_cheap, is_view, work
from fusewright.base.thresholds import HALVES
from fusewright.graph import builder
from fusewright.graph.builder import Builder, argument_types, env_of, given_of
from fusewright.graph.nodes import ancestors
from fusewright.graph.passes.clean.dce import must_stay
from fusewright.graph.passes.clean.escape import shares_memory
from fusewright.operators.derive import derive
from fusewright.operators.rules.common import Undecided, is_dense
from fusewright.operators.rules.views import NO_VIEW
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.strides import dense_order
from fusewright.sizes.tensor_type import TensorType, symbols_in

Node = torch.fx.Node
aten = torch.ops.aten


_COMPARISONS = frozenset(getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_PLAIN = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten._to_copy.default})
DISCOURAGED = 1000
"""How many times its bytes it costs to save what the program asked to be computed again (inside a checkpoint)."""


def saved_bytes(node: Node) -> int:
    """Bytes that saving the value of `node` keeps alive."""
    kind = node.meta.get("type")
    if not isinstance(kind, TensorType):
        return 8
    return max(1, elements(kind) * (narrow_type(node) or kind.dtype).itemsize)


def choose_saved(joint: JointGraph, recompute: bool = True, budget: float = 1.0) -> list[Node]:
    """The forward nodes (inputs included) whose values the backward reads, in graph order.

    recompute  False: every forward value that the backward reads
    budget     share of the bytes of the default choice that may be saved: below 1, reductions and library operators are
               computed again too, those with the least work for a byte first, as far as that is needed"""
    cut = _Cut(joint)
    chosen = cut.saved(cut.cheap if recompute else frozenset())
    target = budget * cut.bytes_of(chosen)
    if budget >= 1 or not recompute or cut.bytes_of(chosen) <= target:
        return chosen
    # More permission never costs more memory: the least permission that is enough is found by bisection.
    costly = sorted(cut.costly, key=lambda node: work(node) / saved_bytes(node))
    low, high = 0, len(costly)
    while low < high:
        middle = (low + high) // 2
        if cut.bytes_of(cut.saved(cut.cheap | frozenset(costly[:middle]))) <= target:
            high = middle
        else:
            low = middle + 1
    return cut.saved(cut.cheap | frozenset(costly[:low]))


class _Cut:
    """Minimum cuts of one joint graph, under different permissions to recompute."""

    def __init__(self, joint: JointGraph) -> None:
        backward = backward_nodes(joint.graph, joint.inputs)
        self.returned = set(results_of(joint.graph)[: joint.outputs])
        results = results_of(joint.graph)[joint.outputs :]
        self.wanted = {
            argument for node in backward for argument in node.all_input_nodes if argument not in backward
        } | {node for node in results if isinstance(node, Node) and node not in backward}
        needed = ancestors(self.wanted)
        self.forward = [node for node in joint.graph.nodes if node in needed and node not in backward]
        self.written = not_kept(joint.graph)
        self.backward = backward
        possible = [node for node in self.forward if can_recompute(node) and not _suits_no_copy(node, self.written)]
        cheap = {node for node in possible if is_cheap(node) or node.meta.get("recompute")}
        self.cheap = frozenset(node for node in cheap if not _compares_with_its_own(node, cheap))
        self.costly = [node for node in possible if node not in cheap]

    def bytes_of(self, saved: list[Node]) -> int:
        """What saving these keeps alive beyond the inputs."""
        return sum(saved_bytes(node) for node in saved if node.op != "placeholder" or node in self.written)

    def saved(self, allowed: frozenset[Node]) -> list[Node]:
        """The values to save when those of `allowed` may be computed again."""
        if not self.wanted:
            return []
        network = Network()
        source, sink = network.vertex(), network.vertex()
        entry: dict[Node, int] = {}
        exit_: dict[Node, int] = {}
        for node in self.forward:
            entry[node], exit_[node] = network.vertex(), network.vertex()
            network.edge(entry[node], exit_[node], self.cost(node, allowed))
            if node not in allowed:
                network.edge(source, entry[node], INFINITE)
            for argument in node.all_input_nodes:
                network.edge(exit_[argument], entry[node], INFINITE)
            if node in self.wanted:
                network.edge(exit_[node], sink, INFINITE)
        # Of the cheapest cuts the one nearest to the backward, which computes least again.
        far = network.sink_side(source, sink)
        of: dict[Node, list[Node]] = {}
        for node in self.forward:
            if entry[node] not in far and exit_[node] in far:
                of.setdefault(_viewed(node), []).append(node)
        chosen = {self._own(node, nodes) for node, nodes in of.items()}
        return [node for node in self.forward if node in chosen]

    def _own(self, viewed: Node, nodes: list[Node]) -> Node:
        """Of the views that are needed of a tensor, the one alone that is a result: it would be a view of what is saved
        beside it, to which nobody may write. Else the tensor."""
        alone = len(nodes) == 1 and nodes[0] in self.returned
        return nodes[0] if alone and viewed.op != "placeholder" and viewed not in self.returned else viewed

    def cost(self, node: Node, allowed: frozenset[Node]) -> int:
        if isinstance(node.meta.get("type"), tuple):
            return INFINITE  # several results: each is saved by its getitem
        if node.op in ("placeholder", "get_attr") and node not in self.written:
            return 1  # an input is alive anyway (a parameter), or at least not copied
        if node.meta.get("recompute") and node in allowed:
            leaves = not all(user.meta.get("recompute") or user in self.backward for user in node.users)
            return saved_bytes(node) if leaves else DISCOURAGED * saved_bytes(node)
        # What plain arithmetic gives need not be in memory if it is not saved: of two values of one size, the other.
        return saved_bytes(node) + (saved_bytes(node) // 64 if node in allowed and node.target in _PLAIN else 0)


def _compares_with_its_own(node: Node, cheap: Set[Node]) -> bool:
    """Whether `node` compares what the backward would compute again with what was made of it in the forward and is
    saved, as the gradient of a maximum does. Code for another kernel may round otherwise, so what was equal need not
    be."""
    if getattr(node.target, "overloadpacket", None) not in _COMPARISONS:
        return False
    again, kept, pending = set(), set(), list(node.all_input_nodes)
    while pending:
        one = pending.pop()
        if one not in cheap:
            kept.add(one)
        elif one not in again:
            again.add(one)
            pending += one.all_input_nodes
    return any(not is_view(one) for one in again & ancestors(kept))


def _viewed(node: Node) -> Node:
    """The tensor that `node` is a view of all elements of: it is saved itself, so that it may be a result of the
    forward, or an input."""
    while is_view(node) and saved_bytes(node) == saved_bytes(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _changes(node: Node, written: set[Node]) -> bool:
    """Whether `node` is an input that changes before the backward runs, or shows a part of one."""
    return _shown(node) in written


_BY_STRIDES = frozenset({aten.as_strided.default, aten._reshape_alias.default})


def _suits_no_copy(node: Node, written: set[Node]) -> bool:
    """Whether `node` asks for eager's strides of what is saved as a copy, which is denser."""
    op = node.target
    asks = isinstance(op, OpOverload) and (op in _BY_STRIDES or facts(op).recasts)
    return asks and (_changes(node, written) or _may_have_gaps(node))


def _may_have_gaps(node: Node) -> bool:
    """Whether sizes do not show that the elements of a computed value lie densely: then its memory is denser than its
    type says (loops/lower/driver.py), and the backward would not find what was saved."""
    node = _shown(node)
    kind = node.meta.get("type")
    if node.op == "placeholder" or not isinstance(kind, TensorType) or not symbols_in((*kind.shape, *kind.stride)):
        return False
    try:
        return not (builder.is_surely_dense(kind, env_of(node.graph)) or is_dense(kind))
    except Undecided:
        return True


def _shown(node: Node) -> Node:
    """What holds the memory that `node` shows."""
    while _shows(node):
        node = node.all_input_nodes[0]
    return node


def _shows(node: Node) -> bool:
    """Whether the node is a view of any kind, or one of several results, which may be views."""
    return is_view(node) or shares_memory(node) or node.target is operator.getitem


def _copy(node: Node, graph: torch.fx.Graph, values: dict[Node, Any], env: ShapeEnv | None = None) -> Node:
    """`node` once more; a view of what lies otherwise here (a copy that was saved) has the strides that follow."""
    made = graph.node_copy(node, lambda argument: values[argument])
    made.meta = dict(node.meta)
    of = node.all_input_nodes[0] if _shows(node) else None
    if of is not None and values[of].meta.get("type") != of.meta.get("type"):
        if node.target is operator.getitem:
            made.meta["type"] = values[of].meta["type"][node.args[1]]
        elif (kind := _type_of_view(made, env)) is not None:
            made.meta["type"] = kind
        else:  # as it lies here it cannot be shown so
            build = Builder(graph, env)
            build.location = node.meta.get("location", ())
            with graph.inserting_before(made):
                dense = build.call(aten.clone.default, values[of], memory_format=torch.contiguous_format)
            made.replace_input_with(values[of], dense)
            made.meta["type"] = _type_of_view(made, env)
    return made


def _type_of_view(node: Node, env: ShapeEnv | None) -> object:
    """None where only a copy of the argument has that shape."""
    named = {name: argument_types(value) for name, value in node.kwargs.items()}
    op: Any = node.target
    try:
        return derive(op, [argument_types(value) for value in node.args], named, env)
    except RuntimeError as error:
        if str(error) != NO_VIEW:
            raise
        return None


def split(joint: JointGraph, recompute: bool = True, budget: float = 1.0) -> Split:
    """Cuts a joint graph; `recompute` and `budget` as for `choose_saved`."""
    saved = choose_saved(joint, recompute, budget)
    backward_set = backward_nodes(joint.graph, joint.inputs)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    results = results_of(joint.graph)
    position = {node: index for index, node in enumerate(placeholders)}

    forward = torch.fx.Graph()
    values: dict[Node, Any] = {}
    for node in joint.graph.nodes:
        if node.op == "output" or node in backward_set:
            continue
        values[node] = _copy(node, forward, values)
    written, env = not_kept(joint.graph), env_of(joint.graph)
    user = [values[item] if isinstance(item, Node) else item for item in results[: joint.outputs]]
    returned = {
        item: index for index, item in reversed(list(enumerate(results[: joint.outputs]))) if isinstance(item, Node)
    }
    extra: list[Node] = []
    places: list[int] = []
    for node in saved:
        if _may_have_gaps(node):
            places.append(~(joint.outputs + len(extra)))
            extra.append(_without_gaps(forward, values[node], env))
        elif node.op == "placeholder" and node not in written:
            places.append(position[node])
        elif node in returned and node.op != "placeholder":
            places.append(~returned[node])
        else:
            places.append(~(joint.outputs + len(extra)))
            extra.append(copied_first(forward, values[node], env) if _changes(node, written) else values[node])
            if (narrow := narrow_type(node)) is not None:
                extra[-1] = _after(forward, values[node], env, torch.ops.aten._to_copy.default, dtype=narrow)
    kinds = output_node(joint.graph).meta.get("type") or (None,) * len(results)
    kept = (*kinds[: joint.outputs], *(None for _ in extra))
    forward.output((*user, *extra)).meta.update(type=kept, given=given_of(joint.graph))

    backward = torch.fx.Graph()
    before, values = values, {}
    for node, place in zip(saved, places):
        values[node] = backward.placeholder(f"saved_{node.name}")
        values[node].meta = {key: value for key, value in node.meta.items() if key != "random"}
        if ~place >= joint.outputs:
            values[node].meta["type"] = extra[~place - joint.outputs].meta.get("type")
    for node in placeholders[joint.inputs :]:
        values[node] = _copy(node, backward, values)
    for node in saved:
        kind = node.meta.get("type")
        if isinstance(kind, TensorType) and (dtype := kind.dtype) != values[node].meta["type"].dtype:
            values[node] = _after(backward, values[node], env, torch.ops.aten._to_copy.default, dtype=dtype)
    roots = {item for item in results[joint.outputs :] if isinstance(item, Node)} | {
        node for node in backward_set if must_stay(node)
    }
    needed = _needed(roots, set(values))
    for node in joint.graph.nodes:
        if node in backward_set and node in needed and node not in values:
            # What is computed again is computed when it is first needed: so it lives shortly, beside what reads it.
            for again in _missing(node, values):
                values[again] = _copy(again, backward, values, env)
            values[node] = _copy(node, backward, values, env)
    for item in results[joint.outputs :]:
        for again in _missing(item, values) if isinstance(item, Node) and item not in values else ():
            values[again] = _copy(again, backward, values, env)
        if isinstance(item, Node) and item not in values:
            values[item] = _copy(item, backward, values, env)
    gradients = tuple(values[item] if isinstance(item, Node) else item for item in results[joint.outputs :])
    backward.output(gradients).meta.update(type=tuple(kinds[joint.outputs :]), given=given_of(joint.graph))
    shared = before.keys() & values.keys() - set(saved)
    for node in shared:
        if _makes_statistics(node, shared, saved):
            before[node].meta["rounded"] = values[node].meta["rounded"] = True
    _drop_dead(forward)
    _drop_dead(backward)
    sizes = _sizes(backward, placeholders[: joint.inputs])
    with backward.inserting_before(next(iter(backward.nodes))):
        for node in sizes:
            _copy(node, backward, {})
    places = [*(position[node] for node in sizes), *places]
    backward.lint()
    forward.lint()
    return Split(forward, backward, tuple(places))


def _makes_statistics(node: Node, again: Set[Node], saved: Sequence[Node]) -> bool:
    """Whether `node`, which the backward computes again, is of a half type, and a reduction of it is saved: a logarithm
    of a sum of exponentials, the mean of a normalisation. The gradient takes the difference of the two, so both must be
    of the same numbers: as in eager of those that memory would hold."""
    kind = node.meta.get("type")
    if not isinstance(kind, TensorType) or kind.dtype not in HALVES or _shows(node):
        return False
    pending, seen = list(node.users), {node}
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if is_view(user):
            pending += user.users
        elif user not in again and not is_cheap(user):
            if any(one in saved for one in (user, *user.users) if one is user or one.target is operator.getitem):
                return True
    return False


def part_of(
    backward: torch.fx.Graph, gradients: list[int], tangents: list[int], group: int
) -> tuple[list[int], torch.fx.Graph]:
    """What of a backward graph computes the outputs at `gradients` and has the effects of `group`.

    Gives which of the placeholders it takes, before those at `tangents`, and its graph."""
    placeholders = [node for node in backward.nodes if node.op == "placeholder"]
    results = results_of(backward)
    wanted = [results[place] for place in gradients]
    effects = [
        node
        for node in backward.nodes
        if node.op == "call_function" and must_stay(node) and node.meta.get("backward") == group
    ]
    needed = _needed({item for item in (*wanted, *effects) if isinstance(item, Node)}, set())
    sizes = {node for node in placeholders if isinstance(node.meta.get("type"), Expr)}
    own = [placeholders[place] for place in tangents]
    saved = [node for node in placeholders if (node in needed or node in sizes) and node not in own]
    part = torch.fx.Graph()
    values: dict[Node, Any] = {}
    for node in (*saved, *own):
        values[node] = _copy(node, part, values)
    for node in backward.nodes:
        if node in needed and node not in values:
            values[node] = _copy(node, part, values)
    given = part.output(tuple(values[item] if isinstance(item, Node) else item for item in wanted))
    given.meta["given"] = given_of(backward)
    part.lint()
    return [placeholders.index(node) for node in saved], part


def _sizes(backward: torch.fx.Graph, inputs: list[Node]) -> list[Node]:
    """The inputs of the forward that are symbolic sizes which the backward needs: no tensor that it reads need have
    that size."""
    used: set[Expr] = set()
    for node in backward.nodes:
        used |= symbols_in((node.meta.get("type"), node.args, node.kwargs))
    return [node for node in inputs if isinstance(node.meta.get("type"), Expr) and node.meta["type"] in used]


@contextmanager
def _at_end(graph: torch.fx.Graph, node: Node, env: ShapeEnv | None) -> Iterator[Builder]:
    """A builder of what is made of `node` in front of what the graph does at its end."""
    build = Builder(graph, env)
    build.location = node.meta.get("location", ())
    first = next((other for other in graph.nodes if other.meta.get("epilogue")), None)
    with graph.inserting_before(first) if first is not None else nullcontext():
        yield build


def _after(graph: torch.fx.Graph, node: Node, env: ShapeEnv | None, target: Any, **kwargs: Any) -> Node:
    with _at_end(graph, node, env) as build:
        return build.call(target, node, **kwargs)


def copied_first(graph: torch.fx.Graph, node: Node, env: ShapeEnv | None) -> Node:
    """A copy of what changes before the backward runs, made in front of what the graph does at its end."""
    return _after(graph, node, env, torch.ops.aten.clone.default)


def _without_gaps(graph: torch.fx.Graph, node: Node, env: ShapeEnv | None) -> Node:
    """A copy whose strides say that it is dense. Its dimensions lie in the same order: kernels read the gradient and
    what was saved in one format."""
    kind = node.meta["type"]
    row_major = list(reversed(range(kind.ndim)))
    with _at_end(graph, node, env) as build:
        return build.densely(node, row_major if 0 in kind.stride else dense_order(kind.shape, kind.stride))


def _needed(roots: set[Node], available: set[Node]) -> set[Node]:
    """The nodes to compute in the backward: everything between `roots` and what is available."""
    seen: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in seen or node in available:
            continue
        seen.add(node)
        pending.extend(node.all_input_nodes)
    return seen


def _missing(node: Node, values: dict[Node, Any]) -> list[Node]:
    """What must be computed before `node`, in order."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending = [(argument, False) for argument in reversed(node.all_input_nodes)]
    while pending:
        one, ready = pending.pop()
        if ready:
            order.append(one)
        elif one not in values and one not in seen:
            seen.add(one)
            pending.append((one, True))
            pending += [(argument, False) for argument in reversed(one.all_input_nodes)]
    return order


def _drop_dead(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not must_stay(node):
            graph.erase_node(node)
