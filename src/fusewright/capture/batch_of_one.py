"""Whether a graph that was captured as if a batch of 1 were several does for 1 what eager does: shown from that one
capture.

Takes the log of a capture whose symbols of size 1 had a larger example (`ShapeEnv.taken`); gives whether interpreting
the frame with sizes of 1 would have recorded the same graph, but for how data is moved (a copy or a view that sizes of
1 make needless). What a program does is decided by what it is told: it would have taken the same way for 1 if every
question about sizes that taking them to be 2 or more has answered has the same answer for 1. Where an answer differs
inside of a call of a torch function (is this tensor contiguous?), that call alone is made again, on tensors as they are
for 1, and what it records is compared by value (graph/translation_validation.py). So is every call that is given a
tensor whose strides, or memory format, are others for 1. The type of every other result is derived once more for 1.
Always holds: what is not understood, or has no counterpart in the log, makes the answer False; the frame is then
captured for 1 too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.signals import Signal
from fusewright.capture.border.copying import is_plain_function, nodes_between, shared_by
from fusewright.capture.border.memoise import Copied
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values import context
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.border.witness import Call, Witness, last_node
from fusewright.graph.fingerprint import NoFingerprint
from fusewright.graph.nodes import leaves
from fusewright.graph.translation_validation import Numbering
from fusewright.operators.meta_kernels import MetadataChanged
from fusewright.operators.schema import argument, facts
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor, make_traced
from fusewright.sizes.expressions import Expr, Relation, Symbol
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.symint import SymNode, dim_of, size_of
from fusewright.sizes.tensor_type import TensorType, alike, contiguous_strides, with_sizes

if TYPE_CHECKING:
    from fusewright.capture.border.world import World

Node = torch.fx.Node
aten = torch.ops.aten

_NUMBERS = (int, torch.SymInt)
_ASK_MEMORY = frozenset({"_is_view", "_base", "_version", "is_set_to", "_is_alias_of", "storage_offset"})
"""Functions and attributes that are about a tensor's memory, not about its elements."""
_BY_MEMORY = frozenset(
    {aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default, aten.as_strided_copy.default}
)


class _Unproven(Exception):
    """Nothing can be said: the text is for whoever looks into it."""


def shown(world: World, outputs: Sequence[object]) -> bool:
    """Whether the frame, whose results are `outputs`, does for sizes of 1 what its capture does; then the sizes know
    (`ShapeEnv.show`)."""
    recorder: Any = world.recorder
    env: ShapeEnv = recorder.env
    tracer = world.tracer
    if recorder.unclear or env.unbacked or tracer.branches.joined or recorder.user_code or world.uses_arrays:
        return False
    classes = {env.simplify(known) for known in env.taken & env.assumed}
    if not classes:
        return True  # nothing depends on their being larger
    one, *others = classes
    if others or not isinstance(one, Symbol) or env.known(Relation("==", one, 1)) is False:
        return False  # one of several may be 1; or the program has fixed a size
    shown = frozenset(known for known in env.taken if env.simplify(known) == one)
    proof = _Proof(world, shown)
    try:
        unwatched(proof.run, outputs)
    except (_Unproven, NoFingerprint, KeyError, Signal, MetadataChanged):
        return False
    env.show(shown, proof.one)
    return True


class _Families:
    """Which values may lie in one memory."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, value: Node) -> Node:
        while value in self.parent:
            value = self.parent[value]
        return value

    def join(self, one: Node, other: Node) -> None:
        one, other = self.find(one), self.find(other)
        if one is not other:
            self.parent[one] = other

    def pattern(self, values: Sequence[Node]) -> list[int]:
        """For each value the place of the first that may share its memory."""
        first: dict[Node, int] = {}
        return [first.setdefault(self.find(value), place) for place, value in enumerate(values)]


class _Proof:
    """One proof. `one`: the sizes, with 1 for those that are shown; `exact`: the types for 1 that are not just what was
    recorded with 1 in place of the symbols, but have other strides; `hidden`: what a call that was made again has
    recorded besides its results; `moved`: results that share memory with others for 1 than was recorded."""

    def __init__(self, world: World, symbols: frozenset[Symbol]) -> None:
        self.world = world
        recorder: Any = world.recorder
        self.recorder: Witness = recorder
        self.env: ShapeEnv = recorder.env
        self.asked = self.env.asked or []
        self.symbols = symbols
        self.one = self.env.supposing(dict.fromkeys(symbols, 1), dict.fromkeys(self.env.taken, 1))
        self.scratch = Recorder("aten", self.one)
        self.exact: dict[Node, Any] = {}
        self.hidden: set[Node] = set()
        self.stand_ins: dict[Node, TracedTensor] = {}
        self.recorded, self.eager, self.either = _Families(), _Families(), _Families()
        self.moved: set[Node] = set()
        self.again_in: dict[
            Node, tuple[set[Node], set[Node]]
        ] = {}  # a result of a repeated call: what it shares memory with
        self._as_recorded, self._as_one = self.env.copy(), self.one.copy()  # to ask what shall leave no trace
        self._written: dict[Node, Any] = {}
        self._plain: dict[Node, bool] = {}

    def run(self, outputs: Sequence[object]) -> None:
        """Raises unless it is shown."""
        env, one, recorder = self.env, self.one, self.recorder
        for relation in env.guards:
            _require(
                Relation(relation.op, one.hint(relation.left), one.hint(relation.right)).holds({}),
                f"a guard: {relation}",
            )
        for_types: dict[int, Node] = {}
        for before, start, end in recorder.inferred:
            for_types.update(dict.fromkeys(range(start, end), _next(recorder.graph, before)))
        calls = {_next(recorder.graph, call.before): call for call in recorder.calls if call.before is not call.last}
        in_calls = {number for call in recorder.calls for number in range(*call.asked)}
        for number, question in enumerate(self.asked):
            if number not in in_calls and number not in for_types:
                _require(not self.differs(question), f"the program asks {question}")
        copies = {copy: (old, one) for one in self.world.repeats.copied for old, copy in one.made.items()}
        rest = iter(list(recorder.graph.nodes))
        for node in rest:
            if node in calls:
                nodes = [node]
                while nodes[-1] is not calls[node].last:
                    nodes.append(next(rest))
                self.call(calls[node], nodes, for_types)
            elif node in copies:
                self.copy(node, *copies[node])
            elif node.op == "call_function":
                _require(all(map(self.is_plain, node.all_input_nodes)), "an operator beside all calls")
                self.operator(node)
        for call in recorder.calls:
            if call.before is call.last:
                self.call(call, [], for_types)
        _require(len(one.guards) == len(env.guards), "a guard of its own")
        _require(one.assumed <= env.assumed | self.symbols, "another size is taken to be larger")
        self.check_memory(outputs)

    def differs(self, question: tuple[Relation | None, Any]) -> bool:
        """Whether the answer for 1 is another one, or is not known."""
        relation, answer = question
        if relation is None:
            return not answer.isdisjoint(self.symbols)
        return self.one.generally(relation) is not answer

    # --- types --------------------------------------------------------------------------------------------------------

    def type_of(self, node: Node) -> Any:
        """What a node's value is for sizes of 1."""
        return self.exact[node] if node in self.exact else self.written(node)

    def written(self, node: Node) -> Any:
        """What was recorded, with 1 in place of the symbols."""
        if node not in self._written:
            self._written[node] = with_sizes(node.meta["type"], self.one.simplify)
        return self._written[node]

    def is_plain(self, node: Node) -> bool:
        """Whether all that can be asked of a tensor, but its sizes, is for 1 as it is for larger sizes."""
        found = self._plain.get(node)
        if found is None:
            found = self._plain[node] = node not in self.exact and node not in self.hidden and self.keeps_format(node)
        return found

    def keeps_format(self, node: Node) -> bool:
        if not isinstance(node.meta["type"], TensorType):
            return True
        special = self.type_of(node)
        type_: Any = with_sizes(node.meta["type"], self.env.simplify)
        if type_ == special:
            return True
        if type_.stride == contiguous_strides(type_.shape) and type_.shape[1:] == special.shape[1:]:
            return True  # the outermost size has no part in the format of a contiguous tensor
        return _formats(type_, self._as_recorded) == _formats(special, self._as_one)

    def operator(self, node: Node) -> None:
        """Derives the type that one operator gives."""
        for base in shared_by(node):
            self.join(node, base)
        if node.target is operator.getitem:
            parent: Any = node.args[0]
            if parent in self.exact:
                self.note(node, self.exact[parent][node.args[1]])
            return
        if self.is_unconcerned(node):
            return
        target: Any = node.target
        args: Any = [self.as_type(value) for value in node.args]
        kwargs = {name: self.as_type(value) for name, value in node.kwargs.items()}
        self.note(node, self.scratch.infer(target, args, kwargs))

    def is_unconcerned(self, node: Node) -> bool:
        """Whether the symbols have no part in an operator."""
        inputs = node.all_input_nodes
        if any(one in self.exact or one in self.hidden or self.type_of(one) is not one.meta["type"] for one in inputs):
            return False
        return self.type_of(node) is node.meta["type"]

    def as_type(self, value: object) -> object:
        if isinstance(value, Node):
            _require(value not in self.hidden, "a value inside of a call")
            return self.type_of(value)
        if isinstance(value, (list, tuple)):
            return [self.as_type(item) for item in value]
        return self.one.simplify(value) if isinstance(value, Expr) else value

    def note(self, node: Node, found: object) -> None:
        """Compares a node's type for 1 with what was recorded, and keeps it where strides along dimensions of 1 are
        others."""
        expected, found = self.type_of(node), with_sizes(found, self.one.simplify)
        if expected == found:
            return
        _require(alike(expected, found), "another type")
        if not _is_laid_out(expected, found):
            self.exact[node] = found

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, call: Call, nodes: list[Node], for_types: Mapping[int, Node]) -> None:
        """One logged call, which has recorded `nodes`."""
        differs = any(self.differs(self.asked[number]) for number in range(*call.asked) if number not in for_types)
        given = [value for value in leaves((call.args, call.kwargs)) if isinstance(value, torch.Tensor)]
        for value in given:
            _require(type(value) is TracedTensor and value.recorder is self.recorder, "a tensor of another kind")
        touched = not all(self.is_plain(value.node) for value in given)  # type: ignore[attr-defined]
        if differs or (touched and not _is_operator(call.function, nodes)):
            self.again(call, nodes)
        else:
            for node in nodes:
                if node.op == "call_function":
                    self.operator(node)

    def again(self, call: Call, nodes: list[Node]) -> None:
        """Makes a call on tensors as they are for 1, and compares what it records and what it gives."""
        scratch = self.scratch
        _require(is_plain_function(call.function), "a function that holds values")
        _require(not _asks_memory(call.function), "a question about memory")
        args, kwargs = self.replaced(call.args), self.replaced(call.kwargs)
        before = last_node(scratch)
        settings = context.snapshot()
        _require(settings.function_modes == call.settings.function_modes, "a function mode")
        _require(settings.inference_mode == call.settings.inference_mode, "inference mode")
        context.restore(call.settings)
        try:
            result = scratch.call(call.function, args, kwargs)
        finally:
            context.restore(settings)
        mine = list(nodes_between(scratch.graph, before, last_node(scratch)))
        _require(
            all(node.op == "call_function" and not _written(node) for node in (*nodes, *mine)), "a constant, or a write"
        )
        numbers: dict[Any, int] = {}
        types: dict[int, Any] = {}
        recorded, special = (Numbering(numbers, self.one.simplify, {}, {}, types) for _ in range(2))
        for value in leaves((call.args, call.kwargs)):
            if type(value) is TracedTensor:
                stand_in = self.stand_ins[value.node]
                number = special.key(("given", id(stand_in)), stand_in.tensor_type)
                recorded.numbers[value.node] = special.numbers[stand_in.node] = number
        for numbering, own in ((recorded, nodes), (special, mine)):
            for node in own:
                numbering.numbers[node] = numbering.number(node)
        _require(recorded.effects == special.effects, "random numbers, or another effect")
        self.hidden.update(nodes)
        self.compare(call.result, result, recorded, special)
        self.share(call.result, result, set(nodes), set(mine))

    def replaced(self, value: Any) -> Any:
        """An argument as it is for 1."""
        kind = type(value)
        if kind is TracedTensor:
            return self.stand_in(value)
        if kind in (tuple, list, torch.Size):
            made = [self.replaced(item) for item in value]
            return made if kind is list else tuple(made)
        if kind is dict:
            return {name: self.replaced(item) for name, item in value.items()}
        if kind is slice:
            return slice(self.replaced(value.start), self.replaced(value.stop), self.replaced(value.step))
        if kind is torch.SymInt:
            return size_of(self.one.simplify(dim_of(value)), self.one)
        _require(is_constant(value), f"an argument of another kind: {kind}")
        return value

    def stand_in(self, tensor: TracedTensor) -> TracedTensor:
        found = self.stand_ins.get(tensor.node)
        if found is None:
            _require(tensor.node not in self.hidden and not tensor.reshaped, "a value inside of a call")
            type_ = self.type_of(tensor.node)
            node = self.scratch._placeholder("value", None)
            node.meta["type"] = type_
            with torch.inference_mode(tensor.is_inference()):
                found = make_traced(self.scratch, node, type_, requires_grad=tensor.requires_grad)
            found.original_class, found.input_storage, found.is_input = (
                tensor.original_class,
                tensor.input_storage,
                tensor.is_input,
            )
            self.stand_ins[tensor.node] = found
        return found

    def compare(self, old: Any, new: Any, recorded: Numbering, special: Numbering) -> None:
        """Raises unless two results are equal."""
        if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
            _require(
                type(old) is type(new) is TracedTensor and old.requires_grad == new.requires_grad,
                "a result of another kind",
            )
            _require(recorded.numbers[old.node] == special.numbers[new.node], "another value")
            if old.node not in self.hidden:  # an argument that comes back
                _require(new is self.stand_ins.get(old.node) or old.node in self.again_in, "another tensor")
                return
            self.hidden.remove(old.node)
            self.again_in[old.node] = set(), set()
            expected, found = self.type_of(old.node), with_sizes(new.tensor_type, self.one.simplify)
            _require(alike(expected, found, strides=False), "a result of another type")
            if not _is_laid_out(expected, found):
                self.exact[old.node] = found
        elif isinstance(old, (tuple, list)):
            _require(isinstance(new, (tuple, list)) and len(old) == len(new), "a result of another kind")
            for one, other in zip(old, new, strict=True):
                self.compare(one, other, recorded, special)
        elif type(old) in _NUMBERS and type(new) in _NUMBERS:
            _require(self.one.simplify(dim_of(old)) == self.one.simplify(dim_of(new)), "another number")
        else:
            _require(type(old) is type(new) and is_constant(old) and old == new, "another result")

    # --- memory -------------------------------------------------------------------------------------------------------

    def join(self, one: Node, other: Node) -> None:
        for families in (self.recorded, self.eager, self.either):
            families.join(one, other)

    def share(self, old: Any, new: Any, nodes: set[Node], mine: set[Node]) -> None:
        """Notes whose memory the results of a repeated call lie in, as recorded and for 1."""
        back = {stand_in.node: node for node, stand_in in self.stand_ins.items()}
        pairs = [(one, other) for one, other in zip(leaves(old), leaves(new), strict=True) if type(one) is TracedTensor]
        results = [one.node for one, _ in pairs]
        bases = [_bases(one.node, nodes) for one, _ in pairs]
        theirs = [{back.get(base, base) for base in _bases(other.node, mine)} for _, other in pairs]
        for node, before, after in zip(results, bases, theirs, strict=True):
            if node in self.again_in:
                self.again_in[node] = before, after
                self.place(node, before, after)
        for one, other in zip(_shared(bases), _shared(theirs), strict=True):
            if one != other:
                self.moved.update(results)

    def place(self, node: Node, before: set[Node], after: set[Node]) -> None:
        for base in before:
            self.recorded.join(node, base)
            self.either.join(node, base)
        for base in after:
            self.eager.join(node, base)
            self.either.join(node, base)
        outside = {base for base in before if base not in self.hidden and base is not node}
        if outside != {base for base in after if base.graph is node.graph}:
            self.moved.add(node)

    def copy(self, node: Node, old: Node, copied: Copied) -> None:
        """A node that was copied, for another call that is given the same."""
        if node is next(iter(copied.made.values())):
            for one, other in copied.given.items():
                same = _is_laid_out(self.type_of(one), self.type_of(other)) and self.is_plain(one) == self.is_plain(
                    other
                )
                _require(
                    same and one not in self.hidden and other not in self.hidden,
                    "a replay that is given something else",
                )
        if old in self.hidden:
            self.hidden.add(node)
            return
        if old in self.exact:
            self.exact[node] = self.exact[old]
        if old in self.again_in:
            to = {**copied.given, **copied.made}
            before, after = ({to.get(base, base) for base in bases} for bases in self.again_in[old])
            self.again_in[node] = before, after
            self.place(node, before, after)
            if old in self.moved:
                self.moved.add(node)
        else:
            for base in shared_by(node):
                self.join(node, base)

    def check_memory(self, outputs: Sequence[object]) -> None:
        """Raises where it would show that some results share memory with others for 1."""
        graph = self.recorder.graph
        results = [value.node for value in outputs if isinstance(value, TracedTensor)]
        for node in results:
            same = node not in self.exact or self.written(node) == self.exact[node]
            _require(same and node not in self.hidden, "a result's layout")
        values = [*results, *graph.find_nodes(op="placeholder")]
        _require(self.recorded.pattern(values) == self.eager.pattern(values), "results that share memory otherwise")
        if not self.moved:
            return
        _require(not self.recorder.identity_asked, "tensors are compared")
        _require(not any(_asks_memory(call.function) for call in self.recorder.calls), "a question about memory")
        unclear = {self.either.find(node) for node in self.moved}
        for node in graph.nodes:
            by_memory = [node.args[0]] if node.target in _BY_MEMORY else []
            for base in (*_written(node), *by_memory):
                _require(self.either.find(base) not in unclear, "a write to what shares memory otherwise")


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise _Unproven(reason)


def _next(graph: torch.fx.Graph, node: Node | None) -> Node:
    """The operator after a node (inputs that were met later stand in front of it)."""
    found = graph._root.next if node is None else node.next
    while found.op == "placeholder":
        found = found.next
    return found


def _formats(type_: TensorType, env: ShapeEnv) -> object:
    """What PyTorch keeps of a tensor's layout; equal to nothing else where the sizes do not decide it."""
    guards, node = len(env.guards), SymNode(0, env)
    sizes, strides = ([SymNode(dim, env) for dim in dims] for dims in (type_.shape, type_.stride))
    asked = (
        node.is_contiguous, node.is_channels_last_contiguous_2d, node.is_channels_last_contiguous_3d,
        node.is_channels_last_strides_2d,
        node.is_channels_last_strides_3d, node.is_non_overlapping_and_dense,
    )  # fmt: skip
    answers = [ask(sizes, strides).value for ask in asked]
    return answers if len(env.guards) == guards else object()


def _is_laid_out(expected: Any, found: Any) -> bool:
    """Whether two types of the same values have all their strides in common."""
    if isinstance(expected, (tuple, list)):
        return all(_is_laid_out(one, other) for one, other in zip(expected, found, strict=True))
    if not isinstance(expected, TensorType):
        return bool(expected == found)
    return (expected.shape, expected.stride, expected.offset) == (found.shape, found.stride, found.offset)


def _is_operator(function: Any, nodes: Sequence[Node]) -> bool:
    """Whether a call is of the very operator that it has recorded, so that nothing was decided in between."""
    targets = [node.target for node in nodes if isinstance(node.target, OpOverload)]
    return (
        len(targets) == 1 and targets[0].overloadpacket.__name__ == getattr(function, "__name__", "").partition(".")[0]
    )


def _asks_memory(function: Any) -> bool:
    """Whether the answer is about a tensor's memory, not about its elements."""
    name = getattr(function, "__name__", "")
    return (getattr(function.__self__, "__name__", "") if name == "__get__" else name) in _ASK_MEMORY


def _written(node: Node) -> list[Node]:
    """What an operator writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    places = facts(node.target).written
    kwargs: Any = node.kwargs
    return [
        one
        for one in leaves([argument(node.target, node.args, kwargs, place) for place in places])
        if isinstance(one, Node)
    ]


def _bases(node: Node, inside: set[Node]) -> set[Node]:
    """The values outside of a call, and the ones inside in memory of their own, that share memory with one of its
    values."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        more = shared_by(one) if one in inside else []
        pending += more
        if not more:
            found.add(one)
    return found


def _shared(bases: Sequence[set[Node]]) -> list[int]:
    """For each set the place of the first that has a value in common with it."""
    return [next(place for place, other in enumerate(bases) if one & other) for one in bases]
