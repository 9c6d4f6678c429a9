"""`export`: a model, captured whole, as a program.

Takes a model, example arguments and what is said of their sizes; gives an `ExportedProgram`. Always holds: no value of
the examples is in the program, and no size that may change; where the program would take another way for a size in its
range, the export is an error that names the dimension, the constraint and the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.utils import _pytree as pytree

from fusewright.base.errors import CannotFunctionalise, ExportError, GraphBreakError, describe_break
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak, SkipFrame
from fusewright.capture.attempt import capture_frame
from fusewright.capture.settings import CaptureOptions
from fusewright.exporting import results
from fusewright.exporting.dims import Dim, Hint
from fusewright.exporting.lift import Input, Lifted, lift
from fusewright.exporting.program import ExportedProgram, Signature, computing, steps_of
from fusewright.exporting.request import Request, memory_order, request_of, stand_in
from fusewright.exporting.spec import container
from fusewright.exporting.subclasses import flattened
from fusewright.exporting.symbols import Captured, Symbols, line_of, symbols_of, unread_root
from fusewright.exporting.text import call_text, line_text
from fusewright.exporting.torch_programs import examples_of, is_torch_program, parts_of
from fusewright.graph.builder import env_of
from fusewright.graph.passes import run_passes
from fusewright.graph.passes.clean.dce import dce
from fusewright.graph.passes.clean.functionalise import functionalise
from fusewright.graph.passes.clean.specialise import specialise
from fusewright.graph.passes.context import PassContext
from fusewright.operators.host_draws import CLOCK, HOST_DRAW, foreseen, row_of
from fusewright.process import PROCESS
from fusewright.sizes.expressions import Symbol, free_symbols, substitute, symbol, to_tuples
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

PASSES = [
    (functionalise, "Replaces writes to tensors by new values; mutated inputs are written once, at the end."),
    (specialise, "Writes sizes that guards have fixed as what they equal."),
    (dce, "Removes what nothing uses."),
]
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame


def _call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The second result sees to it that there is a graph, which knows the sizes, even if the program computes nothing.
    return model(*args, **kwargs), torch.zeros((), device="cpu")


def export(model: Any, args: Any, kwargs: Any = None, *, dynamic_shapes: Any = None) -> ExportedProgram:
    """See `fusewright.export`."""
    flat = None
    if is_torch_program(model):
        model, args, kwargs, flat = parts_of(model)
    if not isinstance(args, (tuple, list)):
        raise ExportError(
            "export takes the example arguments as a tuple, "
            + ("and none were given" if args is None else f"got {type(args).__name__}")
        )
    if not callable(model):
        raise ExportError(f"export takes an nn.Module or a function, got {type(model).__name__}")
    return _export(model, tuple(args), dict(kwargs or {}), dynamic_shapes, flat)


def _export(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, flat: list[Any] | None
) -> ExportedProgram:
    request = request_of(model, args, kwargs, dynamic_shapes, flat)
    with alone():
        captured = _capture(request, {})
        symbols = symbols_of(request, captured)
        _refuse_effects(captured)
        built = _Building(request, captured, symbols)
        program = built.program()
        _check_ones(request, captured, symbols, program)
    program.example_inputs, program.dynamic_shapes = (args, kwargs), dynamic_shapes
    return program


def decomposed(
    program: ExportedProgram,
    function_of: Callable[[torch.fx.Node], Callable[..., Any]],
    laid_out: bool = False,
    native: bool = False,
) -> ExportedProgram:
    """The same program, each of its operators computed by `function_of` its node. laid_out: results that lay row by
    row in memory do so, however the functions' results lie. native: the functions are not a user's."""
    module = program.module()
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    steps, outputs = steps_of(program.graph)
    (output,) = program.graph.find_nodes(op="output")
    results = [node for node in nodes if laid_out and node in output.all_input_nodes and _lies_by_rows(node)]

    def function(node: torch.fx.Node) -> Callable[..., Any]:
        made = function_of(node)
        return (lambda *args, **named: made(*args, **named).contiguous()) if node in results else made

    written = [(function(node), given, named) for node, (_, given, named) in zip(nodes, steps, strict=True)]
    module.fusewright_compute = computing(written, outputs, native)
    module.fusewright_checks = False
    args, kwargs = examples_of(program) if program.example_inputs is None else program.example_inputs
    dims = sizes_again(program)
    made = _export(module, args, kwargs, None, dims)
    for record, own in zip(made.graph_signature.leaves, program.graph_signature.leaves, strict=True):
        record["name"] = own["name"]  # the module's arguments have no names
    made.graph_signature.subclasses = program.graph_signature.subclasses  # the module has their inner tensors
    return made


def _lies_by_rows(node: torch.fx.Node) -> bool:
    kind = node.meta.get("type")
    return isinstance(kind, TensorType) and kind.stride == contiguous_strides(kind.shape)


def sizes_again(program: ExportedProgram, every: bool = False) -> list[dict[int, Dim | Hint]]:
    """For each leaf the sizes that it was exported with. `every`: those of Dim.AUTO are named, with their ranges."""
    symbols, named = program.graph_signature.symbols, {}
    for name, known in symbols.items():
        if known["label"].isidentifier() or every:
            label = known["label"] if known["label"].isidentifier() else name
            named[name] = Dim(label, min=known["min"], max=known["max"])
            named[name].where = known["where"].removeprefix("Dim at ")

    def again(size: Any) -> Dim | Hint:
        if isinstance(size, str):
            return named.get(size, Dim.AUTO)
        left, right = (one if isinstance(one, int) else again(one) for one in size[1:])
        if isinstance(left, int):
            left, right = right, left
        if not isinstance(left, Dim) or not isinstance(right, int):
            return Dim.AUTO
        return left * right if size[0] == "*" else left + right if size[0] == "+" else Dim.AUTO

    return [
        {dim: again(size) for dim, size in enumerate(leaf.get("shape", ())) if not isinstance(size, int)}
        for leaf in program.graph_signature.leaves
    ]


@contextmanager
def alone() -> Iterator[None]:
    """One capture at a time, and none that torch.compile watches."""
    with PROCESS.lock:
        watcher = _set_eval_frame(None)
        try:
            yield
        finally:
            _set_eval_frame(watcher)


def _capture(request: Request, fixed: dict[str, int]) -> Captured:
    stand_ins = [stand_in(request, leaf, fixed) for leaf in range(len(request.leaves))]
    args, kwargs = pytree.tree_unflatten(stand_ins, request.spec)
    try:
        options = CaptureOptions(fullgraph=True, exporting=True)
        frame = capture_frame(cast(Any, _call), (request.model, args, kwargs), options)
    except (GraphBreak, SkipFrame) as signal:
        report = describe_break(signal.code, signal.detail, signal.stack)
        raise GraphBreakError(f"export captures a program whole, and this one breaks.\n{report}", signal.code) from None
    positions = {id(leaf): place for place, leaf in enumerate(stand_ins) if isinstance(leaf, torch.Tensor)}
    if frame.eager_reason:
        raise ExportError(f"the program cannot be exported: {frame.eager_reason}")
    if frame.graph is None:
        return Captured(frame, None, None, stand_ins, positions)
    env = env_of(frame.graph)
    try:
        graph = run_passes(frame.graph, PASSES, PassContext())
    except CannotFunctionalise as error:
        raise ExportError(f"the program writes to memory in a way that has no functional form: {error}") from error
    return Captured(frame, graph, env, stand_ins, positions)


def _refuse_effects(captured: Captured) -> None:
    if captured.frame.effects:
        raise ExportError(
            f"the program changes {captured.frame.effects[0]} at each call, and a program changes nothing but tensors. "
            "Return it, or keep it in a buffer."
        )
    for node in () if captured.graph is None else captured.graph.nodes:
        if node.target is HOST_DRAW and "#" in node.args[0]:
            raise ExportError(
                f"the program draws from a random.Random of its own ({call_text(node)}), which a program cannot hold"
                f"{line_text(node)}\n  what to do: draw before the call and pass what was drawn, or draw from the "
                "module random"
            )


# --- the program -----------------------------------------------------------------------------------------------------


class _Building:
    """The program of one capture."""

    def __init__(self, request: Request, captured: Captured, symbols: Symbols) -> None:
        self.request, self.captured, self.symbols = request, captured, symbols
        model = request.model
        self.state: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, bool] = {}
        self.subclasses: dict[str, Any] = {}
        if isinstance(model, torch.nn.Module):
            persistent = set(model.state_dict(keep_vars=True))
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self._hold(name, parameter, True)
            for name, buffer in model.named_buffers(remove_duplicate=False):
                self.buffers[name] = name in persistent
                self._hold(name, buffer, name in persistent)
        self.names: dict[int, str] = {}
        for name, value in self.state.items():
            self.names.setdefault(id(value), name)
        self.constants: dict[str, torch.Tensor] = {}

    def _hold(self, name: str, value: torch.Tensor, persistent: bool) -> None:
        inner, record = flattened(name, value)
        self.state |= inner
        if record is not None:
            self.subclasses[name] = record
            self.buffers.pop(name, None)
            self.buffers |= {one: persistent for one, part in inner.items() if not isinstance(part, torch.nn.Parameter)}

    def program(self) -> ExportedProgram:
        lifted = self.lifted()
        own = pytree.tree_unflatten(self.captured.stand_ins, self.request.spec)
        flat, gives = results.flat_results(self.captured.frame, self.request.model, own)
        signature = Signature(takes=container(self.request.spec), gives=container(gives), buffers=self.buffers)
        signature.subclasses = self.subclasses
        signature.results = [self._result(kind, target) for kind, target in flat]
        signature.inputs = [{"kind": one.kind, "target": one.target} for one in lifted.inputs]
        signature.outputs = [{"kind": kind, "target": target} for kind, target in lifted.outputs]
        signature.leaves = [self._leaf(place) for place in range(len(self.request.leaves))]
        for (leaf, dim), one in self.symbols.at.items():
            if one in self.symbols.ranges:
                least, most = self.symbols.ranges[one]
                signature.symbols[str(one)] = {
                    "label": self.symbols.labels[one],
                    "leaf": leaf,
                    "dim": dim,
                    "min": least,
                    "max": most,
                    "where": self.symbols.where[one],
                }
        signature.constraints = [
            {"op": fact.op, "left": tree(fact.left), "right": tree(fact.right), "where": where}
            for fact, where in self.symbols.facts
        ]
        return ExportedProgram(lifted.graph, signature, self.state, self.constants, (self.request.spec, gives))

    def lifted(self) -> Lifted:
        captured, request = self.captured, self.request
        inputs: dict[Any, Input] = {}
        seen: set[int] = set()
        graph = captured.graph
        if graph is None:
            graph = torch.fx.Graph()
            graph.output([])
        reals = iter(captured.frame.example_inputs)
        for node in graph.nodes:
            if node.op == "get_attr":
                inputs[node] = self._constant(captured.frame.constants[node.target], node)
            elif node.op == "placeholder":
                real = next(reals)
                if not isinstance(real, torch.Tensor):
                    continue
                if id(real) in captured.positions:
                    leaf = captured.positions[id(real)]
                    seen.add(leaf)
                    inputs[node] = Input("user", leaf, identifier(request.names[leaf]), node.meta.get("type"))
                elif id(real) in self.names:
                    name = self.names[id(real)]
                    kind = "buffer" if name in self.buffers else "parameter"
                    inputs[node] = Input(kind, name, identifier(f"{kind[0]}_{name}"), node.meta.get("type"))
                else:
                    inputs[node] = self._constant(real, node)
        extra = [
            Input("user", leaf, identifier(request.names[leaf]))
            for leaf, real in enumerate(request.leaves)
            if isinstance(real, torch.Tensor) and leaf not in seen
        ]
        sizes = {str(one): place for place, one in self.symbols.at.items()}
        return lift(graph, inputs, extra, sizes, torch.is_grad_enabled())

    def _constant(self, value: Any, node: Any) -> Input:
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"a program cannot hold {type(value).__name__} {node.target}: control flow of tensors")
        name = self._constant_name(value)
        return Input("constant", name, f"c_{name}", node.meta.get("type"))

    def _constant_name(self, value: torch.Tensor) -> str:
        """The name of a tensor that the program has besides its weights."""
        known = next((name for name, one in self.constants.items() if one is value), None)
        if known is None:
            known = f"c{len(self.constants)}"
            self.constants[known] = value
        return known

    def _result(self, kind: str, target: Any) -> dict[str, Any]:
        if kind == "tensor":
            if id(target) in self.captured.positions:
                return {"kind": "leaf", "target": self.captured.positions[id(target)]}
            if id(target) in self.names:
                return {"kind": "state", "target": self.names[id(target)]}
            return {"kind": "constant", "target": self._constant_name(target)}
        return {"kind": kind, "target": target}

    def _leaf(self, place: int) -> dict[str, Any]:
        real, name = self.request.leaves[place], self.request.names[place]
        if not isinstance(real, torch.Tensor):
            return {"name": name, "kind": "value", "value": real}
        shape: list[Any] = list(real.shape)
        where = ["the example's size"] * real.dim()
        env = self.captured.env
        for dim in range(real.dim()):
            size = self.request.dims.get((place, dim))
            one = self.symbols.at.get((place, dim))
            if size is None:
                continue
            if isinstance(size, Dim):
                where[dim] = f"Dim at {size.where}"
            if one is None:
                if isinstance(size, Dim):
                    root = _named(self.symbols, size.name)
                    if root is None:  # no operator reads it: it is free in its range
                        root = unread_root(self.request, self.symbols, size)
                    shape[dim] = tree(root * size.scale + size.offset)
                else:
                    self._unread_auto(place, dim, shape)
                continue
            value = self.symbols.equal.get(one, one)
            if env is not None and isinstance(env.simplify(value), int):
                value = env.simplify(value)
                where[dim] = f"fixed at {line_of(env.fixed_at.get(one, ()))}"
            shape[dim] = tree(value)
        dtype = str(real.dtype).removeprefix("torch.")
        record = {"name": name, "kind": "tensor", "dtype": dtype, "device": real.device.type, "shape": shape}
        return {**record, "order": memory_order(real), "where": where}

    def _unread_auto(self, place: int, dim: int, shape: list[Any]) -> None:
        one = symbol(f"r{place}_{dim}", 0, None)
        self.symbols.at[place, dim] = one
        self.symbols.ranges[one] = (0, None)
        self.symbols.labels[one] = f"{self.request.names[place]}.size({dim})"
        self.symbols.where[one] = "Dim.AUTO"
        shape[dim] = tree(one)


def _named(symbols: Symbols, name: str) -> Symbol | None:
    return next((one for one, label in symbols.labels.items() if label == name), None)


def tree(size: Any) -> Any:
    """A size as plain data."""

    def plain(value: Any) -> Any:
        if isinstance(value, int):
            return value
        return value[1] if value[0] == "sym" else [value[0], plain(value[1]), plain(value[2])]

    return plain(to_tuples(size))


def identifier(name: str) -> str:
    """A name for a placeholder."""
    made = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name).strip("_")
    return f"x_{made}" if not made or made[0].isdigit() else made


# --- sizes of 1 ------------------------------------------------------------------------------------------------------


def _check_ones(request: Request, captured: Captured, symbols: Symbols, program: ExportedProgram) -> None:
    """What was captured for 2 and more is compared, on the examples, with what is captured for 1. Raises ExportError
    when that is another program, and 1 was declared; an undeclared size is 2 or more then."""
    env = captured.env
    if env is None:
        return
    asked = symbols.ones | {
        root
        for one in env.assumed
        for root in free_symbols(substitute(one, symbols.equal))
        if one in symbols.at.values()
    }
    for (leaf, dim), one in list(symbols.at.items()):
        if one not in asked or symbols.ranges.get(one, (2, None))[0] > 1:
            continue
        size, record = request.dims[leaf, dim], program.graph_signature.symbols[str(one)]
        label = size.name if isinstance(size, Dim) else f"{leaf}.{dim}"
        problem = _differs_for_one(request, program, label)
        if problem and isinstance(size, Dim):
            raise ExportError(
                f"the program does otherwise for {label} = 1 than for larger sizes ({problem}): dimension {dim} of "
                f"{request.names[leaf]} was declared with {label} >= 1 at {size.where}. Declare min=2."
            )
        record["min"] = max(record["min"], 2 if problem else 1)


def _differs_for_one(request: Request, program: ExportedProgram, label: str) -> str:
    leaves = list(request.leaves)
    for (leaf, dim), size in request.dims.items():
        own = size.name if isinstance(size, Dim) else f"{leaf}.{dim}"
        if own == label:
            wanted = size.of(1) if isinstance(size, Dim) else 1
            if leaves[leaf].shape[dim] < wanted:
                return ""
            leaves[leaf] = leaves[leaf].narrow(dim, 0, wanted)
    at_one = Request(request.model, leaves, request.spec, request.names, request.dims, request.roots)
    try:
        captured = _capture(at_one, {label: 1})
        other = _Building(at_one, captured, symbols_of(at_one, captured)).program()
    except (GraphBreakError, ExportError) as error:
        return str(error).split("\n")[0]
    mine, others = (one.graph_signature for one in (program, other))
    if (mine.results, mine.outputs, mine.gives) != (others.results, others.outputs, others.gives):
        return "it returns something else"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = [run_flat(one, leaves) for one in (program, other)]
    for one, two in zip(*found, strict=True):
        if isinstance(one, torch.Tensor):
            if one.shape != two.shape:
                return f"a result of shape {tuple(two.shape)} would have shape {tuple(one.shape)}"
            if not torch.allclose(one.double(), two.double(), rtol=1e-3, atol=1e-4, equal_nan=True):
                return "results differ"
        elif one != two:
            return f"a result of {two} would be {one}"
    return ""


def run_flat(program: ExportedProgram, leaves: list[Any]) -> list[Any]:
    """The outputs of the program's graph, without its effects."""
    torch.manual_seed(0)
    signature = program.graph_signature
    sources = {"parameter": program.state, "buffer": program.state, "constant": program.constants}
    given = [
        leaves[record["target"]] if record["kind"] == "user" else sources[record["kind"]][record["target"]]
        for record in signature.inputs
    ]
    return list(_Still(program.graph_module).run(*given))


class _Still(torch.fx.Interpreter):
    """Runs a graph with clocks that stand still, and generators of Python and NumPy that do not move."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CLOCK:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        if target is HOST_DRAW:
            return torch.as_tensor(foreseen([args]), dtype=row_of(args[0]).dtype, device="cpu")
        return super().call_function(target, args, kwargs)
