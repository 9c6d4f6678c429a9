"""Backends by name: what each takes (a torch-level or an ATen-level graph) and how it turns a graph into a callable.

Takes a name, a callable or a `Backend`; gives a `Backend`. Built-in ones are modules of this folder, each with a
`BACKEND`, imported when asked for; further ones come from `register_backend` and from the entry-point group
`torch_dynamo_backends`, which is the ecosystem's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import keyword
import re
import types
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal

from torch.fx.node import map_aggregate

from fusewright.backends.repeat import has_checks, leaving_settings, repeatable
from fusewright.base.errors import BackendError, OptionError, near_misses
from fusewright.base.events import Generating
from fusewright.base.location import as_traceback
from fusewright.base.options import CAPTURE_OPTIONS, Settings
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field, replace
from fusewright.base.rewrites import Rewrites
from fusewright.capture.frame import Backward
from fusewright.graph.bound_names import as_module
from fusewright.graph.grad_mode import run_with_grad_mode
from fusewright.record.traced_tensor import cut_off
from fusewright.sizes.expressions import Expr

ENTRY_POINT_GROUP = "torch_dynamo_backends"

BUILT_IN = {
    "native": "fusewright.backends.native",
    "eager": "fusewright.backends.eager",
    "aot_eager": "fusewright.backends.aot_eager",
    "cudagraphs": "fusewright.backends.cudagraphs",
    "onnxrt": "fusewright.backends.onnxrt",
    "xla": "fusewright.backends.xla.backend",
    "inductor": "fusewright.backends.inductor",
}

RETIRED = {
    "aot_nvfuser": "nvFuser was removed from PyTorch; use 'native'",
    "nvfuser": "nvFuser was removed from PyTorch; use 'native'",
    "ofi": "torch.jit.optimize_for_inference is not a graph backend any more; use 'native' under torch.no_grad()",
    "aot_cudagraphs": "it is called 'cudagraphs' now",
    "ts": "TorchScript is no graph backend any more; use 'native'",
    "nnc": "PyTorch's NNC compiler was retired; use 'native'",
    "aot_ts": "TorchScript is no graph backend any more; use 'aot_eager'",
    "onnxruntime": "it is called 'onnxrt' now",
}


_WITHOUT_TEXT = (
    type, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverloadPacket, torch.Generator, torch.finfo,
    torch.iinfo, torch.ScriptObject,
)  # fmt: skip
"""Arguments whose text is no Python code."""


def _make_writable(graph: torch.fx.Graph, constants: dict[str, Any]) -> None:
    """Changes what a GraphModule's code cannot hold: the operator `torch.ops.aten.random.from`, a keyword argument
    called `class`, a function or class as an argument (which joins the constants)."""
    names: dict[int, str] = {}

    def attribute(node: torch.fx.Node, value: Any) -> Any:
        if not isinstance(value, _WITHOUT_TEXT):
            return value
        name = names.get(id(value))
        if name is None:
            name = names[id(value)] = f"object_{len(constants)}"
            constants[name] = value
        with graph.inserting_before(node):
            return graph.create_node("get_attr", name)

    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        odd = frozenset(name for name in node.kwargs if keyword.iskeyword(name))
        if odd or (isinstance(node.target, torch._ops.OpOverload) and keyword.iskeyword(node.target._overloadname)):
            node.target = _callable_of(node.target, odd)
            node.op = "call_function"
            node.kwargs = {name + "_" * (name in odd): value for name, value in node.kwargs.items()}
        given = map_aggregate((node.args, node.kwargs), functools.partial(attribute, node))
        if names:
            node.args, node.kwargs = given  # type: ignore[misc, assignment]


@functools.cache
def _callable_of(target: Any, odd: frozenset[str]) -> Callable[..., Any]:
    """A function or method (its name) under a name that code can hold, taking the arguments `odd` with a `_` behind
    their names."""

    stands_for = {name + "_": name for name in odd}

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {stands_for.get(name, name): value for name, value in kwargs.items()}
        return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)

    name = target if isinstance(target, str) else getattr(target, "__name__", "operator")
    call.__name__ = call.__qualname__ = re.sub(r"\W", "_", f"call_{name}")
    return call


@dataclass(slots=True)
class GraphToCompile:
    """A captured graph on its way to a backend.

    graph           FX graph at the backend's level; placeholders in the order of `example_inputs`
    constants       tensors of get_attr nodes
    example_inputs  the real inputs of the call that caused the compile
    function        the name of the captured frame, for messages and events
    notify          emits an event (fusewright.base.events.Event)
    backward        set when `graph` is a joint graph: forward and backward operators in one
    parameters      positions of the inputs that are parameters or buffers of modules: they seldom change
    rewrites        the budget of rewrites that all passes over this graph and its halves share
    """

    graph: torch.fx.Graph
    constants: dict[str, Any]
    example_inputs: tuple[Any, ...]
    function: str
    settings: Settings
    notify: Callable[[Any], None]
    backward: Backward | None = None
    parameters: frozenset[int] = frozenset()
    rewrites: Rewrites = field(default_factory=Rewrites)

    def without_examples(self) -> GraphToCompile:
        """For what outlives the compile: a backward that is compiled later must not keep the first call's inputs
        alive."""
        return replace(self, example_inputs=())

    def tell_kernel(self, number: int, total: int) -> None:
        """Announces the kernel that is being made, for who waits."""
        self.notify(Generating(self.function, number, total))

    def module(self, graph: torch.fx.Graph | None = None) -> torch.fx.GraphModule:
        """The graph (or another over the same constants) as a GraphModule whose attributes are the constants."""
        graph = self.graph if graph is None else graph
        _make_writable(graph, self.constants)
        root = torch.nn.Module()
        for node in graph.find_nodes(op="get_attr"):
            if not node.users:  # native code below a torch-level call has read it
                graph.erase_node(node)
            elif not hasattr(root, node.target):
                value = self.constants[node.target]
                if isinstance(value, torch.Tensor):
                    root.register_buffer(node.target, value)
                else:
                    setattr(root, node.target, value)
        return as_module(root, graph)

    def real_inputs(self) -> list[Any]:
        """The inputs of the call that caused the compile: tensors, and Python numbers for symbolic sizes."""
        env = next((node.meta.get("env") for node in self.graph.nodes if node.op == "output"), None)
        return [
            env.real(value) if isinstance(value, Expr) and env is not None else value for value in self.example_inputs
        ]


@dataclass(frozen=True, slots=True)
class Backend:
    """name; `level`: which graph it takes; `compile(graph)` gives a callable over the flat inputs that returns the flat
    outputs (tuple).

    follows_autograd: the callable's outputs carry autograd's history when the inputs do (it runs PyTorch operators).
    trains: takes joint graphs (`GraphToCompile.backward` set) and attaches their backward.
    dynamic: takes graphs with symbolic sizes; otherwise every combination of sizes is a compile of its own.
    own_random: takes dropout as a function of a seed and positions (record/draws.py), unless the option
    `fallback_random` says no.
    lowers: a torch-level backend that also takes graphs of ATen operators, for programs with calls that have no form at
        torch level.
    takes_options, takes_mode: whether it is given those of `compile`; else they are refused, but for capture's options.
    """

    name: str
    level: Literal["aten", "torch"]
    compile: Callable[[GraphToCompile], Callable[..., Any]]
    follows_autograd: bool = True
    trains: bool = False
    dynamic: bool = True
    own_random: bool = False
    lowers: bool = True
    takes_options: bool = False
    takes_mode: bool = False

    def callable(self, to_compile: GraphToCompile) -> Callable[..., Any]:
        """What `compile` gives. A graph of PyTorch's calls lives as long as that, and its traced tensors no longer lead
        to it."""
        made = self.compile(to_compile)
        if self.level == "torch":
            cut_off(to_compile.graph)
        return made


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Adds a backend under its name; a later one of the same name replaces it."""
    _backends[backend.name] = backend
    return backend


def register_backend(compiler: Any = None, name: str | None = None, *, tracing_context: bool = False) -> Any:
    """Decorator: registers `compiler(gm, example_inputs, **options)` as a backend.

    `gm` is a torch.fx.GraphModule at torch level: call_function and call_method nodes, with parameters, buffers and
    symbolic sizes as placeholders, writes and views as the program has them, and a tuple as output;
    `node.meta["example_value"]` tells shapes and dtypes. `example_inputs` are the real tensors (ints for sizes). It
    returns a callable over the same inputs. The name is the function's unless given: `@register_backend`,
    `@register_backend("name")` and `@register_backend(name="name")` all work. `tracing_context`: it is called as
    torch.compile calls backends, inside PyTorch's tracing context and with fake tensors in `node.meta["example_value"]`
    and `node.meta["val"]`; each set of sizes is a graph of its own then. Raises OptionError for what is not callable,
    and for the name of a built-in backend.
    """
    if compiler is not None and not callable(compiler) and not isinstance(compiler, str):
        raise OptionError(f"register_backend takes a function, got {compiler!r}")
    if isinstance(compiler, str):
        return lambda fn: register_backend(fn, compiler, tracing_context=tracing_context)
    if compiler is None:
        return lambda fn: register_backend(fn, name, tracing_context=tracing_context)
    name = name or compiler.__name__
    if name in BUILT_IN:
        raise OptionError(f"register_backend: {name!r} is a backend of fusewright itself, take another name")
    register(from_callable(compiler, name, dynamic=not tracing_context, tracing_context=tracing_context))
    return compiler


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable without a readable signature, e.g. a C function: call it the plain way
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def from_callable(
    function: Callable[..., Any], name: str, dynamic: bool = True, tracing_context: bool = False
) -> Backend:
    """A Backend that calls `function(gm, example_inputs)`; what it raises reaches the user as BackendError naming the
    backend. `tracing_context`: see `register_backend`."""

    takes_options, takes_mode = _accepts(function, "options"), _accepts(function, "mode")

    def compile_graph(to_compile: GraphToCompile) -> Callable[..., Any]:
        settings = to_compile.settings
        keywords: dict[str, Any] = {}
        if takes_options and settings.backend_options is not None:
            keywords["options"] = settings.backend_options
        if takes_mode and settings.mode != "default":
            keywords["mode"] = settings.mode
        module = to_compile.module()
        for node in module.graph.nodes:
            if node.meta.get("location"):
                node.stack_trace = as_traceback(node.meta["location"])
        try:
            if tracing_context:
                tracing = importlib.import_module("fusewright.backends.tracing")  # lazy: it needs PyTorch's own tracers
                compiled = tracing.call_traced(function, module, to_compile.real_inputs(), keywords)
            else:
                compiled = function(module, to_compile.real_inputs(), **keywords)
        except Exception as error:
            raise BackendError(
                f"backend {name!r} failed on the graph of {to_compile.function}: {type(error).__name__}: {error}"
            ) from error
        if not callable(compiled):
            raise BackendError(
                f"backend {name!r} returned {type(compiled).__name__} for {to_compile.function}; it must return a "
                "callable"
            )
        if has_checks(to_compile.graph):
            return as_tuple(repeatable(compiled, to_compile.graph, torch_level=True, checks_alone=True))
        return as_tuple(leaving_settings(compiled, to_compile.graph))

    return Backend(name, "torch", compile_graph, dynamic=dynamic, takes_options=takes_options, takes_mode=takes_mode)


def check_arguments(backend: Backend, settings: Settings) -> None:
    """Raises OptionError for a mode or options that `backend` would not look at."""
    if settings.mode != "default" and not backend.takes_mode:
        raise OptionError(f"backend {backend.name!r} takes no mode, got {settings.mode!r}")
    unknown = sorted(set(settings.backend_options or ()) - CAPTURE_OPTIONS)
    if unknown and not backend.takes_options:
        choices = ", ".join(sorted(CAPTURE_OPTIONS))
        raise OptionError(f"backend {backend.name!r} takes no options, got {unknown} (those of capture: {choices})")


def counts_of(graph: torch.fx.Graph) -> dict[int, int]:
    """How often the versions of inputs grow that a functional graph writes to, where that is not once."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    counts = {node.args[0]: node.meta["counted"] for node in graph.nodes if "counted" in node.meta}
    return {place: counts[node] for place, node in enumerate(nodes) if counts.get(node, 1) != 1}


def below_autograd(function: Callable[..., Any], counts: dict[int, int]) -> Callable[..., Any]:
    """`function` over recorded ATen operators, run as they were recorded: with autograd and autocast done already.
    `counts`: of the graph (`counts_of`, asked before a compiler may change it); versions then grow by so much."""

    def run(*inputs: Any) -> Any:
        with torch.no_grad(), torch._C._DisableAutocast():
            return function(*inputs)

    def counted(*inputs: Any) -> Any:
        written = {place: inputs[place] for place in counts if not inputs[place].is_inference()}
        with torch.autograd._unsafe_preserve_version_counter(tuple(written.values())):
            results = run(*inputs)
        torch.autograd.graph.increment_version([one for place, one in written.items() for _ in range(counts[place])])
        return results

    return _making_views(counted if counts else run)


def _making_views(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose views of its inputs are made in the caller's grad mode, and when all writes are done: autograd asks
    for both where what they show gets a history later."""

    def attempt(*inputs: Any) -> tuple[Any, ...]:
        results, made = run(*inputs), {id(one): one for one in inputs}
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        for one in results:
            if id(one) in made or not isinstance(one, torch.Tensor) or one.is_inference() or not one._is_view():
                continue
            if recorded:
                torch._C._autograd._set_creation_meta(one, torch._C._autograd.CreationMeta.DEFAULT)
            made[id(one)] = torch.ops.aten.alias.default(one)
        return tuple([made.get(id(one), one) for one in results])

    return attempt


def by_operators(to_compile: GraphToCompile, graph: torch.fx.Graph) -> Callable[..., Any]:
    """A functional graph (or half of one), run by PyTorch's operators."""
    run_with_grad_mode(graph)
    return below_autograd(to_compile.module(graph).forward, counts_of(graph))


def as_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, giving a tuple whatever sequence or single value it returns."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        outputs = function(*inputs)
        return outputs if isinstance(outputs, tuple) else tuple(outputs) if isinstance(outputs, list) else (outputs,)

    return run


def _entry_points() -> dict[str, Any]:
    return {
        point.name: point
        for point in entry_points(group=ENTRY_POINT_GROUP)
        if not point.value.startswith("fusewright.")
    }


def required(what: str, modules: dict[str, str]) -> None:
    """Raises OptionError unless all `modules` (name → what to install) are there."""
    missing = [package for module, package in modules.items() if find_spec(module) is None]
    if missing:
        raise OptionError(f"{what} needs packages that are not installed: pip install {' '.join(missing)}")


def list_backends() -> list[str]:
    """The names that `compile(backend=...)` accepts, sorted."""
    return sorted({*BUILT_IN, *_backends, *_entry_points()})


def resolve(backend: Any) -> Backend:
    """The backend for what the user gave: a name, a callable, or a `Backend`. Raises OptionError with the near
    misses."""
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, str):
        if backend in _backends:
            return _backends[backend]
        if backend in BUILT_IN:
            return register(importlib.import_module(BUILT_IN[backend]).BACKEND)
        if backend in RETIRED:
            raise OptionError(f"backend {backend!r} is retired: {RETIRED[backend]}")
        points = _entry_points()
        if backend in points:
            try:
                loaded = points[backend].load()
            except Exception as error:
                raise OptionError(
                    f"backend {backend!r} cannot be loaded from {points[backend].value}: {error}"
                ) from error
            return register(from_callable(loaded, backend))
        raise OptionError(f"unknown backend {backend!r}: {near_misses(backend, list_backends())}")
    if callable(backend):
        return from_callable(backend, getattr(backend, "__name__", type(backend).__name__))
    raise OptionError(f"backend takes a name or a callable, got {backend!r}")
