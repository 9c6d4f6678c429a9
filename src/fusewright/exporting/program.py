"""An exported program: a functional graph, what its inputs and outputs are, and the weights.

Takes what `export` or `load` has made; gives a module that runs it, its text, and PyTorch's form of it.
Always holds: the signature is plain data (what JSON holds); nothing runs that is not an operator of the graph.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from fusewright.base import marks
from fusewright.base.errors import ProgramInputError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.exporting.text import program_text

Tree = Any
"""A size: an int, the name of a symbol, or [operator, left, right]."""

SIZE_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
}


def size_value(tree: Tree, values: Mapping[str, int]) -> int:
    """A size where the symbols have these values."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return values[tree]
    return SIZE_OPERATORS[tree[0]](size_value(tree[1], values), size_value(tree[2], values))


def holds(fact: Mapping[str, Any], values: Mapping[str, int]) -> bool:
    """Whether a constraint of a signature holds for these sizes."""
    return RELATIONS[fact["op"]](size_value(fact["left"], values), size_value(fact["right"], values))


def zeros_of(record: Mapping[str, Any], values: Mapping[str, int]) -> torch.Tensor:
    """A tensor argument of a signature for these sizes: its dimensions lie in memory as the example's do."""
    shape, order = [size_value(size, values) for size in record["shape"]], record["order"]
    dtype = getattr(torch, record["dtype"])
    made = torch.zeros([shape[dim] for dim in order], dtype=dtype, device=record["device"])
    return made.permute([order.index(dim) for dim in range(len(order))])


def size_text(tree: Tree, labels: Mapping[str, str], inside: bool = False) -> str:
    """A size as a user reads it. inside: as an operand."""
    if isinstance(tree, int):
        return str(tree)
    if isinstance(tree, str):
        return labels[tree]
    listed = tree[0] in ("min", "max")
    left, right = (size_text(side, labels, not listed) for side in tree[1:])
    if listed:
        return f"{tree[0]}({left}, {right})"
    return f"({left} {tree[0]} {right})" if inside else f"{left} {tree[0]} {right}"


@dataclass(slots=True)
class Signature:
    """What a program takes and gives; every field is what JSON holds.

    leaves       the flat arguments: {"name", "kind": "tensor", "dtype", "device", "shape", "order", "where"} (sizes are
                 trees, `order` the dimensions from the outermost in memory to the innermost), or {"name", "kind":
                 "value", "value"}
    inputs       one record a placeholder: {"kind": "parameter" | "buffer" | "constant" | "user", "target"}; the target
                 is a name of the state, or a leaf
    outputs      one record an output of the graph: {"kind": "buffer_mutation" | "input_mutation" | "user", "target"}
    results      the flat results: {"kind": "output" (of the graph) | "leaf" | "state" | "constant" |
                 "value", "target"}
    symbols      by name: {"label", "leaf", "dim", "min", "max", "where"}
    constraints  relations between sizes: {"op", "left", "right", "where"}
    buffers      names of the state that are buffers, with whether they are persistent
    takes, gives the containers of arguments (a pair of a tuple and a dict) and of results
    subclasses   weights that were tensor subclasses, by name: see subclasses.py
    """

    leaves: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    symbols: dict[str, dict[str, Any]] = field(default_factory=dict)
    constraints: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, bool] = field(default_factory=dict)
    takes: Any = None
    gives: Any = None
    subclasses: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {name: getattr(self, name) for name in FIELDS}

    def _targets(self, records: list[dict[str, Any]], kind: str) -> list[Any]:
        return [record["target"] for record in records if record["kind"] == kind]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that the graph reads, in order."""
        return self._targets(self.inputs, "parameter")

    @property
    def lifted_buffers(self) -> list[str]:
        """Names of the buffers that the graph reads, in order."""
        return self._targets(self.inputs, "buffer")

    @property
    def user_inputs(self) -> list[str]:
        """Names of the tensors that a call gives, in order."""
        return [self.leaves[leaf]["name"] for leaf in self._targets(self.inputs, "user")]

    @property
    def buffers_to_mutate(self) -> list[str]:
        """Names of the buffers that a call writes to."""
        return self._targets(self.outputs, "buffer_mutation")

    @property
    def user_inputs_to_mutate(self) -> list[str]:
        """Names of the inputs that a call writes to."""
        return [self.leaves[leaf]["name"] for leaf in self._targets(self.outputs, "input_mutation")]


FIELDS = ("leaves", "inputs", "outputs", "results", "symbols", "constraints", "buffers", "takes", "gives", "subclasses")


class ExportedProgram:
    """A program that was captured whole.

    graph            a functional torch.fx.Graph over ATen operators; placeholders as `signature.inputs` says
    graph_signature  what the graph takes and gives
    state            parameters and buffers by name; tied ones are one tensor under several names
    constants        tensors that the program has besides
    example_inputs   (args, kwargs) of the export; None for a program that was loaded
    dynamic_shapes   what the export was given
    """

    def __init__(
        self,
        graph: torch.fx.Graph | Callable[[], torch.fx.Graph],
        signature: Signature,
        state: dict[str, torch.Tensor],
        constants: dict[str, torch.Tensor],
        specs: tuple[pytree.TreeSpec, pytree.TreeSpec],
    ) -> None:
        self._graph, self.graph_signature = graph, signature
        self.state, self.constants = state, constants
        self.in_spec, self.out_spec = specs
        self.example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.dynamic_shapes: Any = None

    @property
    def graph(self) -> torch.fx.Graph:
        """The operators; read from the program's package where it comes from one, when it is first asked for."""
        if not isinstance(self._graph, torch.fx.Graph):
            self._graph = self._graph()
        return self._graph

    @property
    def range_constraints(self) -> dict[str, tuple[int, int | None]]:
        """The range of each named size, (least, most); most is None where there is no bound."""
        return {known["label"]: (known["min"], known["max"]) for known in self.graph_signature.symbols.values()}

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph as a module over its flat placeholders: gives new values of what is mutated, then the results."""
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name."""
        return {name: value for name, value in self.state.items() if self.graph_signature.buffers.get(name, True)}

    def with_state(self, of: Callable[[torch.Tensor], torch.Tensor]) -> ExportedProgram:
        """The same program with other weights: `of` each one."""
        state = {name: of(value) for name, value in self.state.items()}
        specs = self.in_spec, self.out_spec
        made = ExportedProgram(self._graph, self.graph_signature, state, self.constants, specs)
        made.example_inputs, made.dynamic_shapes = self.example_inputs, self.dynamic_shapes
        return made

    def print_readable(self, print_output: bool = True) -> str:
        """The program's text: its operators under the user's lines that they came from."""
        text = program_text(self.graph)
        if print_output:
            sys.stdout.write(text + "\n")
        return text

    def module(self) -> ProgramModule:
        """A module that runs the program and shares its weights. It holds for the arguments that the signature says;
        others raise ProgramInputError."""
        return ProgramModule(self)

    def run_decompositions(self, table: dict[Any, Callable[..., Any]] | None = None) -> ExportedProgram:
        """The program with operators written as others: `table` has a function for each (operator, an OpOverload); by
        default none is."""
        functions = table or {}
        tracing = importlib.import_module("fusewright.exporting.trace")  # lazy: brings the compiler
        made: ExportedProgram = tracing.decomposed(self, lambda node: functions.get(node.target, node.target))
        return made

    def to_torch(self) -> Any:
        """The program as a torch.export.ExportedProgram, made by PyTorch's exporter; sizes that may change stay so."""
        return importlib.import_module("fusewright.exporting.torch_programs").to_torch(self)

    def __str__(self) -> str:
        return program_text(self.graph)


class _Value:
    """In the arguments of a step: the value number `place`."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def computing(steps: Sequence[Step], outputs: Any, native: bool = True) -> Callable[[list[Any]], Any]:
    """What gives the outputs for the values of the placeholders, by performing the steps. native: they call nothing but
    torch functions, and a capture need not interpret them."""

    def compute(values: list[Any]) -> Any:
        values = list(values)
        for function, arguments, keywords in steps:
            given = {name: _given(value, values) for name, value in keywords.items()}
            values.append(function(*_given(arguments, values), **given))
        return _given(outputs, values)

    if native:
        setattr(compute, marks.NATIVE, True)
    return compute


def steps_of(graph: torch.fx.Graph) -> tuple[list[Step], Any]:
    """The operators in order, with their arguments; and the graph's outputs. Placeholders are the first values."""
    places: dict[torch.fx.Node, _Value] = {}
    steps: list[Step] = []
    place: Any = places.__getitem__
    for node in graph.nodes:
        args = torch.fx.map_arg(node.args, place)
        if node.op == "output":
            return steps, _plain(args[0])
        places[node] = _Value(len(places))
        if node.op == "call_function":
            steps.append((node.target, _plain(args), _plain(torch.fx.map_arg(node.kwargs, place))))
    raise AssertionError("a graph has an output")


def _plain(value: Any) -> Any:
    """Without FX's own containers."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _given(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, _Value):
        return values[argument.place]
    if isinstance(argument, list):
        return [_given(item, values) for item in argument]
    return tuple([_given(item, values) for item in argument]) if isinstance(argument, tuple) else argument


class _Names(torch.nn.Module):
    """A level of the names of the weights."""


def _set(root: torch.nn.Module, name: str, value: torch.Tensor, persistent: bool) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, _Names())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value, persistent)


class ProgramModule(torch.nn.Module):
    """Runs an exported program. Its weights have the names that the exported module's had."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        signature = program.graph_signature
        self.fusewright_signature, self.fusewright_checks = signature, True
        self.fusewright_takes, self.fusewright_gives = program.in_spec, program.out_spec
        self.fusewright_compute = computing(*steps_of(program.graph))
        self.fusewright_constants = program.constants
        self.fusewright_inputs = tuple((record["kind"], record["target"]) for record in signature.inputs)
        self.fusewright_labels = {name: known["label"] for name, known in signature.symbols.items()}
        for name, value in program.state.items():
            _set(self, name, value, signature.buffers.get(name, True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        results = self.fusewright_run(self.fusewright_checked(args, kwargs))
        return pytree.tree_unflatten(results, self.fusewright_gives)

    def fusewright_run(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat results for flat arguments that are as the signature says."""
        signature = self.fusewright_signature
        values: list[Any] = []
        for kind, target in self.fusewright_inputs:
            if kind == "user":
                values.append(laid_out(leaves[target], signature.leaves[target]["order"]))
            else:
                values.append(self.fusewright_constants[target] if kind == "constant" else self._state(target))
        outputs = self.fusewright_compute(values)
        user = []
        for record, value in zip(signature.outputs, outputs):
            if record["kind"] == "user":
                user.append(value)
            elif record["kind"] == "input_mutation":
                leaves[record["target"]].copy_(value)
            else:
                with torch.no_grad():
                    self._state(record["target"]).copy_(value)
        results = []
        for record in signature.results:
            kind, target = record["kind"], record["target"]
            if kind == "output":
                results.append(user[target])
            elif kind == "leaf":
                results.append(leaves[target])
            else:
                known: Any = {"state": self._state, "constant": self.fusewright_constants.get}.get(kind)
                results.append(target if known is None else known(target))
        return results

    def _state(self, name: str) -> Any:
        module: Any = self
        *path, last = name.split(".")
        for part in path:
            module = module._modules[part]
        return module._parameters[last] if last in module._parameters else module._buffers[last]

    def fusewright_checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments. Raises ProgramInputError for what the program does not hold for."""
        signature = self.fusewright_signature
        names = self.fusewright_takes.children()[1].context
        if len(kwargs) > 1 and list(kwargs) != names and sorted(kwargs) == sorted(names):
            kwargs = {name: kwargs[name] for name in names}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.fusewright_takes:
            raise ProgramInputError(f"the program was exported for arguments {self.fusewright_takes}, got {spec}")
        if not self.fusewright_checks:
            return leaves
        for record, leaf in zip(signature.leaves, leaves):
            if record["kind"] == "tensor":
                _check_tensor(record, leaf)
            elif type(leaf) is not type(record["value"]) or leaf != record["value"]:
                raise ProgramInputError(
                    f"{record['name']} is {leaf!r}; the program was exported for {record['value']!r}, a fixed value"
                )
        self._check_sizes(leaves)
        return leaves

    def _check_sizes(self, leaves: list[Any]) -> None:
        signature, labels = self.fusewright_signature, self.fusewright_labels
        sizes: dict[str, Any] = {}
        for name, known in signature.symbols.items():
            value = sizes[name] = leaves[known["leaf"]].shape[known["dim"]]
            least, most = known["min"], known["max"]
            if value < least or (most is not None and value > most):
                bound = f"{least} <= {known['label']}" + ("" if most is None else f" <= {most}")
                raise ProgramInputError(
                    f"dimension {known['dim']} of {signature.leaves[known['leaf']]['name']} ({known['label']}) has "
                    f"size {value}; the program holds for {bound} ({known['where']})"
                )
        for record, leaf in zip(signature.leaves, leaves):
            if record["kind"] == "tensor":
                for dim, size in enumerate(record["shape"]):
                    wanted = size_value(size, sizes)
                    if leaf.shape[dim] != wanted:
                        said = "" if isinstance(size, int) else f"{size_text(size, labels)}, which is "
                        raise ProgramInputError(
                            f"dimension {dim} of {record['name']} has size {leaf.shape[dim]}; the program holds for "
                            f"{said}{wanted} ({record['where'][dim]})"
                        )
        for fact in signature.constraints:
            if not holds(fact, sizes):
                left, right = size_text(fact["left"], labels), size_text(fact["right"], labels)
                given = ", ".join(f"{labels[name]} = {value}" for name, value in sizes.items())
                raise ProgramInputError(f"the program holds for {left} {fact['op']} {right} ({fact['where']}): {given}")


def _check_tensor(record: dict[str, Any], leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise ProgramInputError(f"{record['name']} takes a tensor, got {type(leaf).__name__}")
    dtype, device, rank = record["dtype"], record["device"], len(record["shape"])
    if str(leaf.dtype) != f"torch.{dtype}" or leaf.device.type != device or leaf.dim() != rank:
        raise ProgramInputError(
            f"{record['name']} takes a tensor of {rank} dimensions, {dtype}, on {device}; got {leaf.dim()} dimensions, "
            f"{str(leaf.dtype).removeprefix('torch.')}, on {leaf.device.type}"
        )


def laid_out(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`tensor`, in memory as the program was captured for."""
    if order == list(range(tensor.dim())):
        return tensor.contiguous()
    outer = tensor.permute(order)
    if outer.is_contiguous():
        return tensor
    return outer.contiguous().permute([order.index(dim) for dim in range(len(order))])
