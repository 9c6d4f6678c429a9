"""Backend `onnxrt`: graphs exported to ONNX and run by ONNX Runtime, on the CPU or a CUDA device, for inference.

Takes torch-level graphs; gives callables over ONNX Runtime sessions. Always holds: inputs, weights among them, are read
where they lie; writes reach the inputs, and results that share an input's memory share it. A session runs only on sizes
that its export holds for; others get a session of their own. Without the packages the name is an error that says what
to install; so is a call that wants gradients, since ONNX Runtime gives none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.fx import map_arg

from fusewright.backends.onnx_export import PACKAGES, onnx_program
from fusewright.backends.registry import from_callable, required
from fusewright.base.errors import BackendError
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType

required("backend 'onnxrt'", {**PACKAGES, "onnxruntime": "onnxruntime"})

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_ELEMENTS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip
"""ONNX's number of each dtype."""

_MOST_SIZES = 1024
_BODIES = (5, 10)  # attributes that are graphs
_ANY_DTYPE = {"Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that ONNX Runtime computes in bfloat16 on a CPU: they move values."""


def _compile(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    ):
        raise BackendError("ONNX Runtime computes no gradients: call under torch.no_grad()")
    return _Sessions(module, _session(module, example_inputs))


class _Sessions:
    """The sessions of a graph, by the sizes that they hold for."""

    def __init__(self, module: torch.fx.GraphModule, first: _Session) -> None:
        self.module, self.sessions, self.lock = module, [first], threading.Lock()
        self.by_sizes: dict[tuple[Any, ...], _Session] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        sizes = tuple([value.shape if isinstance(value, torch.Tensor) else value for value in inputs])
        session = self.by_sizes.get(sizes)
        if session is None:
            session = self._for(sizes, inputs)
        return session(inputs)

    def _for(self, sizes: tuple[Any, ...], inputs: tuple[Any, ...]) -> _Session:
        with self.lock:
            session = next((one for one in self.sessions if one.holds_for(inputs)), None)
            if session is None:
                session = _session(self.module, inputs)
                self.sessions.append(session)
            if len(self.by_sizes) >= _MOST_SIZES:
                self.by_sizes.clear()
            self.by_sizes[sizes] = session
        return session


class _Layout:
    """Where the results of a graph are, behind a session.

    results  each result: ("input", place), ("constant", value) or ("output", place among the session's)
    written  the places of the inputs that are written to, whose new values are the session's last outputs
    shared   the outputs that lie in an input's memory
    """

    def __init__(self) -> None:
        self.results: list[tuple[str, Any]] = []
        self.written: list[int] = []
        self.shared: set[int] = set()


class _Outer(torch.nn.Module):
    """The graph for PyTorch's exporter, which takes tensors and symbolic sizes only as results, each once."""

    def __init__(self, module: torch.fx.GraphModule, layout: _Layout) -> None:
        super().__init__()
        self.module, self.layout = module, layout  # the exporter undoes changes of a module's own lists

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        taken: dict[int, tuple[str, Any]] = {id(value): ("input", place) for place, value in enumerate(inputs)}
        given: list[Any] = []
        results: list[tuple[str, Any]] = []
        for value in self.module(*inputs):
            if not isinstance(value, (torch.Tensor, torch.SymInt)):
                results.append(("constant", value))
                continue
            if id(value) not in taken:
                taken[id(value)] = ("output", len(given))
                given.append(value)
            results.append(taken[id(value)])
        memory = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        self.layout.shared |= {
            place
            for place, value in enumerate(given)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in memory
        }
        self.layout.results = results
        return (*given, *[inputs[place].clone() for place in self.layout.written])


def _session(module: torch.fx.GraphModule, inputs: Any) -> _Session:
    from torch.export import Dim, export

    for value in inputs:
        if not (value.dtype in _ELEMENTS if isinstance(value, torch.Tensor) else type(value) is int):
            what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise BackendError(f"an input of {what} cannot be handed to ONNX Runtime")

    def free(node: torch.fx.Node, value: Any) -> Any:
        """The sizes that may vary; PyTorch's exporter fixes those of 0 and 1."""
        kind = node.meta.get("type")
        if not isinstance(kind, TensorType):
            return Dim.AUTO
        sizes = enumerate(zip(kind.shape, value.shape))
        return {dim: Dim.AUTO for dim, (size, real) in sizes if not isinstance(size, int) and real > 1} or None

    shapes = tuple([free(*pair) for pair in zip(module.graph.find_nodes(op="placeholder"), inputs)])
    examples = tuple([value.detach() if isinstance(value, torch.Tensor) else value for value in inputs])
    layout = _Layout()
    outer = _Outer(module, layout)
    with torch.no_grad():
        program = export(outer, examples, dynamic_shapes=(shapes,), strict=False)
        made = onnx_program(program, what="backend 'onnxrt'")
        layout.written = _written(made.exported_program)
        if layout.written:
            program = export(outer, examples, dynamic_shapes=(shapes,), strict=False)
            made = onnx_program(program, what="backend 'onnxrt'")
        return _Session(layout, (program, made), _device(examples))


def _device(inputs: tuple[Any, ...]) -> torch.device:
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)} or {torch.device("cpu")}
    if len(devices) > 1:
        raise BackendError(f"inputs are on several devices: {sorted(map(str, devices))}")
    return devices.pop()


class _Session:
    """One export and its ONNX Runtime session."""

    def __init__(self, layout: _Layout, exported: tuple[Any, Any], device: torch.device) -> None:
        import onnxruntime

        program, made = exported

        self.device = device
        provider = _PROVIDERS.get(device.type)
        if provider not in onnxruntime.get_available_providers():
            raise BackendError(f"this onnxruntime does not run on {device.type}")
        self.results, self.written = layout.results, layout.written
        _refuse_draws(made.exported_program.graph)
        placeholders = program.graph.find_nodes(op="placeholder")
        self.takes = [node.meta["val"] for node in placeholders]
        self.guards = getattr(program.module(), "_guards_fn", None)
        (outputs,) = (node.args[0] for node in program.graph.find_nodes(op="output"))
        places = {node: place for place, node in enumerate(placeholders)}
        self.views = {place: _view(outputs[place], places) for place in layout.shared}
        self.dtypes = [getattr(node.meta["val"], "dtype", None) for node in outputs]
        options: list[Any] = [(provider, {"device_id": device.index or 0}) if device.type == "cuda" else provider]
        text = (_widened(made.model_proto) if device.type == "cpu" else made.model_proto).SerializeToString()
        self.session = onnxruntime.InferenceSession(text, providers=options)
        self.names = [entry.name for entry in self.session.get_inputs()]
        self.outputs = [entry.name for entry in self.session.get_outputs()]
        if len(self.names) != len(placeholders) or len(self.outputs) != len(outputs):
            raise BackendError("PyTorch's exporter has left out an input or a result")

    def holds_for(self, inputs: tuple[Any, ...]) -> bool:
        """Whether the export has asked nothing about sizes that these do not answer as its examples did."""
        symbols: dict[str, int] = {}
        for known, value in zip(self.takes, inputs):
            sizes = (known.shape, value.shape) if isinstance(value, torch.Tensor) else ((known,), (value,))
            for size, real in zip(*sizes):
                expected = size if isinstance(size, int) else symbols.setdefault(str(size), real)
                if expected != real:
                    return False
        if self.guards is None:
            return True
        try:
            self.guards(*inputs)
        except AssertionError:
            return False
        return True

    def __call__(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        binding = self.session.io_binding()
        kind, number = self.device.type, self.device.index or 0
        kept = []  # until the run has ended
        for name, value in zip(self.names, inputs):
            if isinstance(value, torch.Tensor):
                tensor = value.detach().contiguous()
                place = (kind, number)
            else:
                tensor, place = torch.tensor(value, device="cpu"), ("cpu", 0)
            kept.append(tensor)
            binding.bind_input(name, *place, _ELEMENTS[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        for name, dtype in zip(self.outputs, self.dtypes):
            binding.bind_output(name, *((kind, number) if dtype is not None else ("cpu", 0)))
        if kind == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # ONNX Runtime has a stream of its own
        self.session.run_with_iobinding(binding)
        if kind == "cuda":
            binding.synchronize_outputs()
        values = [_tensor(value, dtype) for value, dtype in zip(binding.get_outputs(), self.dtypes)]
        for written, value in zip(self.written, values[len(values) - len(self.written) :]):
            inputs[written].detach().copy_(value)
        return tuple([self._result(where, value, inputs, values) for where, value in self.results])

    def _result(self, where: str, value: Any, inputs: tuple[Any, ...], values: list[Any]) -> Any:
        if where != "output":
            return inputs[value] if where == "input" else value
        view = self.views.get(value)
        return values[value] if view is None else view(inputs)


def _tensor(value: Any, dtype: torch.dtype | None) -> Any:
    """The tensor, or the size, that ONNX Runtime's value is, in the same memory."""
    tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    if dtype is None:
        return int(tensor)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _written(program: Any) -> list[int]:
    """The places of the inputs that a functional program gives new values."""
    places = {spec.arg.name: place for place, spec in enumerate(program.graph_signature.input_specs)}
    changed = [spec.target for spec in program.graph_signature.output_specs if spec.kind.name != "USER_OUTPUT"]
    if not all(name in places for name in changed):
        raise BackendError(f"the graph writes to {changed}, not all of which are inputs")
    return [places[name] for name in changed]


def _refuse_draws(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if drawn and not (
            node.target is torch.ops.aten.scaled_dot_product_attention.default and not any(node.args[4:5])
        ):
            raise BackendError(f"{node.target} draws random numbers, and ONNX Runtime's are not PyTorch's")


def _view(output: torch.fx.Node, places: dict[torch.fx.Node, int]) -> Callable[[tuple[Any, ...]], Any]:
    """What makes a result in an input's memory of the inputs: the program's own views of it. Writes are done then."""

    def value(node: torch.fx.Node, inputs: tuple[Any, ...]) -> Any:
        if node in places:
            return inputs[places[node]]
        if isinstance(node.target, torch._ops.OpOverload) and facts(node.target).written:
            return value(node.args[0], inputs)  # type: ignore[arg-type]
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: value(one, inputs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return lambda inputs: value(output, inputs)


def _widened(model: Any) -> Any:
    """The model, with what ONNX Runtime cannot do in bfloat16 on a CPU computed in float32 and rounded."""
    import onnx
    import onnx_ir

    half, full = onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT
    made = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))
    for graph in made.graphs():
        for node in list(graph):
            bodies = any(attribute.type in _BODIES for attribute in node.attributes.values())
            narrow = [value for value in node.inputs if value is not None and value.dtype == half]
            if not narrow or bodies or node.op_type in _ANY_DTYPE:
                continue
            for place, value in enumerate(node.inputs):
                if value is not None and value.dtype == half:
                    cast = onnx_ir.node("Cast", [value], attributes={"to": full.value})
                    cast.outputs[0].dtype, cast.outputs[0].shape = full, value.shape
                    graph.insert_before(node, cast)
                    node.replace_input_with(place, cast.outputs[0])
            for value in node.outputs:
                if value.dtype == half:
                    users, result = list(value.uses()), value.is_graph_output()
                    cast = onnx_ir.node("Cast", [value], attributes={"to": half.value})
                    rounded = cast.outputs[0]
                    rounded.dtype, rounded.shape, value.dtype = half, value.shape, full
                    rounded.name, value.name = value.name, f"{value.name}_wide"
                    graph.insert_after(node, cast)
                    for user, place in users:
                        user.replace_input_with(place, rounded)
                    if result:
                        graph.outputs[list(graph.outputs).index(value)] = rounded
    return onnx_ir.to_proto(made)


BACKEND = replace(from_callable(_compile, "onnxrt"), lowers=False)
