"""`fusewright.minify`: which part of the compiler is at fault, and the smallest program that shows it.

Takes a function and its arguments, for which compiled code gives a wrong result, raises, crashes the process, is slow
or is compiled again; gives a `Minified`: the backend, the rewrite, stage, fusion, kernel or guard at fault, and a
program that fails alone. Always holds: each program that is tried computes its own expectation by eager PyTorch, so a
smaller one fails for its own sake; what may crash runs in a child process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.fx

from fusewright import api
from fusewright.base import events
from fusewright.base.errors import OptionError
from fusewright.base.options import SKIPPABLE
from fusewright.base.records import dataclass, field, replace
from fusewright.tools import bench
from fusewright.tools.patching import patch

Kind = Literal["wrong", "crash", "slow", "recompiles"]
KINDS: tuple[str, ...] = get_args(Kind)
SLOW = 1.2
"""Times eager's time from which on compiled code counts as slow."""
_SIZES = (1, 2, 3, 4, 8, 16, 32)
_NUMBERS = 16
"""So many numbers of inputs at most stand in a program; a seed or a file gives more."""
_WRITTEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@dataclass(slots=True, frozen=True)
class Minified:
    """backend: the first of eager, aot_eager and native that fails. culprit: the rewrite (with its pass), the stage, or
    "fusion" or "kernel" with the operators of the kernels; for recompiles the guard, how it failed, and what to do.
    program: it fails when it is run."""

    kind: Kind
    backend: str
    culprit: str
    program: str

    def __str__(self) -> str:
        return f"{self.kind}: backend {self.backend}, {self.culprit}\n\n{self.program}"


@dataclass(slots=True, frozen=True)
class _Case:
    """A torch-level graph of one output, with what its placeholders get; seeded: inputs are `torch.randn` of their
    sizes."""

    graph: torch.fx.Graph
    inputs: tuple[Any, ...]
    seeded: bool = False

    def function(self) -> Callable[..., Any]:
        return torch.fx.GraphModule({}, self.graph).forward

    def source(self) -> str:
        """The function's text."""
        code = torch.fx.GraphModule({}, self.graph).graph.python_code("self").src
        lines = [re.sub(r";\s+(\w+ = )+None.*| *# .*", "", line) for line in code.splitlines() if line.strip()]
        begin = next(place for place, line in enumerate(lines) if line.startswith("def forward"))
        names = ", ".join(str(node.target) for node in self.graph.find_nodes(op="placeholder"))
        return "\n".join([f"def f({names}):", *lines[begin + 1 :]])

    def arguments(self) -> tuple[Any, ...]:
        if not self.seeded:
            return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in self.inputs)
        torch.manual_seed(0)
        return tuple(map(_seeded_value, self.inputs))

    def is_short(self) -> bool:
        """Whether a program can hold the inputs: seeded, or few and plain numbers."""
        return self.seeded or sum(map(_numbers, self.inputs)) <= _NUMBERS

    def program(self, kind: Kind, file: Path | None = None) -> str:
        """A program that fails. Inputs that are not short are read from `file`."""
        given = f"args = torch.load({str(file)!r})" if file else f"args = {self._texts()}"
        run = "fusewright.compile(f)(*args)"
        check = {
            "wrong": f"torch.testing.assert_close({run}, f(*args), rtol=1e-3, atol=1e-3)",
            "crash": run,
            "slow": "from torch.utils.benchmark import Timer; compiled = fusewright.compile(f); compiled(*args)\n"
            'seconds = [Timer("g(*args)", globals={"g": g, "args": args}).blocked_autorange().median '
            "for g in (compiled, f)]\n"
            f"assert seconds[0] < {SLOW} * seconds[1], seconds",
            "recompiles": "",
        }[kind]
        return f"import torch, fusewright\n\n{self.source()}\n\ntorch.manual_seed(0)\n{given}\n{check}\n"

    def _texts(self) -> str:
        return "[" + ", ".join(map(_seeded_text if self.seeded else _value_text, self.inputs)) + "]"


def _seeded_value(value: Any) -> Any:
    """What `_seeded_text` makes."""
    if not isinstance(value, torch.Tensor):
        return value
    make = torch.randn if value.is_floating_point() else torch.zeros
    return make(tuple(value.shape), dtype=value.dtype)


def _seeded_text(value: Any) -> str:
    """An expression that makes an input like `value`."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(value.shape)
    if value.is_floating_point():
        suffix = "" if value.dtype is torch.float32 else f", dtype={value.dtype}"
        return f"torch.randn({shape}{suffix})"
    return f"torch.zeros({shape}, dtype={value.dtype})"


def _numbers(value: Any) -> float:
    """How many numbers the text of an input has; infinite where text cannot give it."""
    if not isinstance(value, torch.Tensor):
        return 1 if value is None or (isinstance(value, bool | int | float) and math.isfinite(value)) else math.inf
    plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    whole = plain and not value.is_complex() and value.is_contiguous() and bool(value.isfinite().all())
    return max(value.numel(), 1) if whole and value.dtype in _WRITTEN else math.inf


def _value_text(value: Any) -> str:
    """An expression of an input's very numbers."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = "" if value.numel() else f".reshape({tuple(value.shape)})"
    return f"torch.tensor({value.tolist()}, dtype={value.dtype}){shape}"


def minify(
    f: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, kind: Kind = "wrong"
) -> Minified | None:
    """What is at fault when compiled `f(*args, **kwargs)` gives a wrong result or raises (kind "wrong"), crashes the
    process ("crash") or is slow ("slow"), and a small program that fails. None where nothing fails. A function with
    graph breaks is taken graph by graph. For "recompiles", `args` is a list of calls: a tuple of arguments for each."""
    f = api._original(f)
    if kind == "recompiles":
        return _minify_calls(f, [(tuple(one), dict(kwargs or {})) for one in args], {})
    for case in collect(f, args, kwargs or {}):
        found = minify_case(case, kind)
        if found is not None:
            return found
    return None


def minify_script(script: Path, kind: Kind = "wrong") -> Minified | None:
    """The same for what a script compiles by `fusewright.compile` or `torch.compile`: it is run once, eagerly, to note
    the graphs (for "recompiles", the calls). Raises OptionError where it compiles nothing."""
    cases: list[_Case] = []
    noted: list[_Noted] = []
    package: Any = sys.modules["fusewright"]
    original = package.compile
    compiled = []

    def noting(model: Any = None, **arguments: Any) -> Any:
        if model is None:
            return functools.partial(noting, **arguments)
        compiled.append(model)
        if kind == "recompiles":
            noted.append(_Noted(model, arguments))
            return noted[-1].eager()
        return original(model, **{**arguments, "backend": collector(cases), "mode": None, "options": None})

    package.compile = api.compile = noting
    try:
        with patch():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        package.compile = api.compile = original
        for one in noted:
            if one.hook is not None:
                one.hook.remove()
    if not compiled:
        raise OptionError(f"{script} compiles nothing: it calls neither fusewright.compile nor torch.compile")
    if kind == "recompiles":
        tried = (_minify_calls(one.model, one.calls, one.arguments) for one in noted)
        return next((found for found in tried if found is not None), None)
    return next((found for found in (minify_case(case, kind) for case in cases) if found is not None), None)


def collect(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Case]:
    """The graphs of a call, each with its inputs."""
    cases: list[_Case] = []
    api.compile(f, backend=collector(cases), dynamic=False)(*args, **kwargs)
    return cases


def collector(cases: list[_Case]) -> Callable[..., Any]:
    """A backend that notes graphs and runs them eagerly."""

    def note(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph, given = torch.fx.Graph(), [one.detach() if isinstance(one, torch.Tensor) else one for one in inputs]
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        head = None
        for node in module.graph.nodes:  # a constant becomes one more input
            constant = node.op == "get_attr"
            if constant and head is not None:
                with graph.inserting_after(head):
                    head = copies[node] = graph.placeholder(str(node.target).replace(".", "_"))
                given.append(getattr(module, str(node.target)))
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            head = copies[node] if node.op == "placeholder" else head
        cases.append(_Case(graph, tuple(given)))
        return module.forward

    return note


def minify_case(case: _Case, kind: Kind) -> Minified | None:
    """The same for one graph."""

    def fails(one: _Case, **arguments: Any) -> bool:
        return _fails(one, kind, arguments) and not (beside and not _slower_than_capture(one, arguments))

    beside = False
    if not fails(case):
        return None
    # Guards and the call make a tiny case slow whatever it computes: that is another fault than slow code.
    beside = kind == "slow" and _slower_than_capture(case, {})
    for step in (_seeded, _one_output, _shorter, _cut_inputs, _smaller, _seeded):
        while (smaller := next(filter(fails, step(case)), None)) is not None:
            case = smaller
    backend, culprit = _attributed(case, fails, kind != "crash")
    file = None
    if not case.is_short():
        file = Path(tempfile.mkdtemp(prefix="fusewright-")) / "inputs.pt"
        torch.save(list(case.inputs), file)
    return Minified(kind, backend, culprit, case.program(kind, file))


# --- does it fail? ----------------------------------------------------------------------------------------------------


def _fails(case: _Case, kind: Kind, arguments: dict[str, Any]) -> bool:
    """Whether a case fails as `kind` says, and eager PyTorch runs it."""
    if arguments.get("backend", "native") == "native":
        arguments = {**arguments, "options": {"disk_cache": False, **arguments.get("options", {})}}
    try:
        function, inputs = case.function(), case.arguments()
        with torch.no_grad():
            expected = function(*case.arguments())
    except Exception:
        return False  # no program: its pieces do not fit together
    if kind == "crash":
        return _crashes(case, arguments)
    with torch.no_grad():
        try:
            compiled = api.compile(function, **arguments)
            got = compiled(*inputs)
            if kind == "slow":
                return _slower(compiled, function, inputs=inputs)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
        except Exception:
            return True
    return False


def _crashes(case: _Case, arguments: dict[str, Any]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = None if case.is_short() else Path(folder) / "inputs.pt"
        if file is not None:
            torch.save(list(case.inputs), file)
        program = case.program("crash", file).replace("compile(f)", f"compile(f, **{arguments!r})")
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, check=False, timeout=600).returncode < 0


def _slower_than_capture(case: _Case, arguments: dict[str, Any]) -> bool:
    """Whether it is slow beside the same graph compiled by the backend `eager`."""
    given = {**arguments, "options": {"disk_cache": False, **arguments.get("options", {})}}
    given = given if arguments.get("backend", "native") == "native" else arguments
    inputs, function = case.arguments(), case.function()
    with torch.no_grad():
        return _slower(api.compile(function, **given), api.compile(function, backend="eager"), inputs=inputs)


def _slower(*two: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether the first takes `SLOW` times the second's time: the best of turns, as other programs run too."""
    calls = {str(place): functools.partial(one, *inputs) for place, one in enumerate(two)}
    first, second = map(min, bench.compare_times(calls, 0.02)[0].values())
    return first > SLOW * second


# --- smaller cases ----------------------------------------------------------------------------------------------------


def _calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call_")]


def _ending(case: _Case, result: int) -> _Case:
    """The case whose result is that of its call number `result`."""
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    wanted = _calls(case.graph)[result]
    for node in case.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if node is wanted:
            break
    graph.output(copies[wanted])
    return _without_unused(replace(case, graph=graph))


def _without_unused(case: _Case) -> _Case:
    graph = case.graph
    for node in reversed(_calls(graph)):
        if not node.users and not str(node.target).endswith("_"):
            graph.erase_node(node)
    kept = []
    for node, value in zip(list(graph.find_nodes(op="placeholder")), case.inputs):
        if node.users:
            kept.append(value)
        else:
            graph.erase_node(node)
    return replace(case, inputs=tuple(kept))


def _seeded(case: _Case) -> Iterator[_Case]:
    if not case.seeded:
        yield replace(case, seeded=True)


def _one_output(case: _Case) -> Iterator[_Case]:
    """Each result alone."""
    (output,) = case.graph.find_nodes(op="output")
    calls = _calls(case.graph)
    for node in output.all_input_nodes if not isinstance(output.args[0], torch.fx.Node) else ():
        if node in calls:
            yield _ending(case, calls.index(node))


def _shorter(case: _Case) -> Iterator[_Case]:
    """The shortest beginning that fails comes first."""
    yield from (_ending(case, result) for result in range(len(_calls(case.graph)) - 1))


def _cut_inputs(case: _Case) -> Iterator[_Case]:
    """The ends: what the calls up to one give are inputs, from the longest cut to the shortest; then one call less."""
    values: dict[torch.fx.Node, Any] = {}
    calls = _calls(case.graph)
    with torch.no_grad():
        for node, value in zip(case.graph.find_nodes(op="placeholder"), case.arguments()):
            values[node] = value
        for node in calls:
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            own: Any = node.target
            called = getattr(arguments[0], own) if node.op == "call_method" else own
            values[node] = called(*(arguments[1:] if node.op == "call_method" else arguments), **named)
    for place in range(len(calls) - 1):
        yield _from(case, set(calls[len(calls) - 1 - place :]), values)


def _from(case: _Case, kept: set[torch.fx.Node], values: dict[torch.fx.Node, Any]) -> _Case:
    """The case with the calls `kept` alone: what the others give are inputs."""
    graph, copies, inputs = torch.fx.Graph(), {}, []
    copied = [node for node in case.graph.nodes if node in kept or node.op == "output"]
    needed = dict.fromkeys(one for node in copied for one in node.all_input_nodes)
    for node in needed:
        if node not in kept:
            copies[node] = graph.placeholder(node.name)
            inputs.append(values[node])
    for node in copied:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return replace(case, graph=graph, inputs=tuple(inputs))


def _smaller(case: _Case) -> Iterator[_Case]:
    """Each size that inputs have, smaller wherever it stands."""
    tensors = [one for one in case.inputs if isinstance(one, torch.Tensor)]
    for size in sorted({size for one in tensors for size in one.shape}, reverse=True):
        for less in (one for one in _SIZES if one < size):
            inputs = tuple(_resized(one, size, less) if isinstance(one, torch.Tensor) else one for one in case.inputs)
            yield replace(case, inputs=inputs)


def _resized(tensor: torch.Tensor, size: int, less: int) -> torch.Tensor:
    return tensor[tuple(slice(less) if one == size else slice(None) for one in tensor.shape)].contiguous()


# --- what is at fault -------------------------------------------------------------------------------------------------


def _attributed(case: _Case, fails: Callable[..., bool], told: bool) -> tuple[str, str]:
    """(backend, culprit) of a case that fails; `told`: this process may compile it, to name what was made."""
    if fails(case, backend="eager"):
        return "eager", "capture"
    backend = "aot_eager" if fails(case, backend="aot_eager") else "native"  # both run the passes that clean the graph
    if not fails(case, options={"stop_after_rewrites": 0}):
        low, high = 0, 1
        while not fails(case, options={"stop_after_rewrites": high}):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(case, options={"stop_after_rewrites": middle}) else (middle, high)
        where = f": {_told(case, {'stop_after_rewrites': high})[1]}" if told else ""
        return backend, f"rewrite {high}{where}"
    if backend == "aot_eager":
        return backend, "the recording of ATen operators"
    for stage in SKIPPABLE:
        if not fails(case, options={"skip_stage": stage, "stop_after_rewrites": 0}):
            return backend, f"stage {stage}"
    fusion = not fails(case, options={"fusion": False, "stop_after_rewrites": 0})
    kernels = f" {_told(case, {'stop_after_rewrites': 0})[0]}" if told else ""
    return "native", f"{'fusion' if fusion else 'kernel'}{kernels}"


def _told(case: _Case, options: dict[str, Any]) -> tuple[str, str]:
    """The kernels of a compile, and where its rewrites stopped."""
    kernels: list[str] = []
    stopped: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.KernelMade):
            kernels.append(f"{event.name} ({', '.join(event.origins)})")
        elif isinstance(event, events.Stopped):
            stopped.append(f"{event.rewrite} (pass {event.name})")

    with events.STREAM.listening(listen), torch.no_grad():
        _fails(case, "wrong", {"options": options})
    return ", ".join(kernels) or "(a library call)", ", ".join(dict.fromkeys(stopped))


# --- recompiles -------------------------------------------------------------------------------------------------------

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class _Noted:
    """What a script compiles, with its arguments for compile, and its calls."""

    model: Any
    arguments: dict[str, Any]
    calls: list[_Call] = field(default_factory=list)
    hook: Any = None

    def eager(self) -> Any:
        """The same, uncompiled; it notes its calls."""
        if isinstance(self.model, torch.nn.Module):
            self.hook = self.model.register_forward_pre_hook(
                lambda module, args, kwargs: self.calls.append((args, kwargs)), with_kwargs=True
            )
            return self.model

        @functools.wraps(self.model)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            return self.model(*args, **kwargs)

        return noting


def _minify_calls(f: Callable[..., Any], calls: Sequence[_Call], given: Mapping[str, Any]) -> Minified | None:
    """The first two calls of which the second compiles again, with as few differences as do it. `given` are the
    arguments for compile."""
    kept = {name: given[name] for name in ("dynamic", "fullgraph") if given.get(name) is not None}
    at = next((at for at in range(1, len(calls)) if _recompile(f, calls[: at + 1], kept)), None)
    if at is None:
        return None
    pairs = [[calls[before], calls[at]] for before in reversed(range(at))]
    pair = next((pair for pair in pairs if _recompile(f, pair, kept)), None)
    if pair is None:
        return Minified("recompiles", "eager", _recompile(f, calls[: at + 1], kept), "# no two calls alone do it\n")
    first, second = pair
    for place, value in enumerate(first[0][: len(second[0])]):
        args = (*second[0][:place], value, *second[0][place + 1 :])
        if _recompile(f, [first, (args, second[1])], kept):
            second = (args, second[1])
    for name, value in first[1].items():
        if name in second[1] and _recompile(f, [first, (second[0], {**second[1], name: value})], kept):
            second = (second[0], {**second[1], name: value})
    culprit = _recompile(f, [first, second], kept)
    program = _graph_program(f, (first, second), kept) or _source_program(f, (first, second), kept)
    return Minified("recompiles", "eager", culprit, program or "# it needs more of its module than its source\n")


def _recompile(f: Callable[..., Any], calls: Sequence[_Call], given: Mapping[str, Any]) -> str:
    """Which guard the last call fails, and what to do; nothing where it finds a version that fits, or a call fails."""
    told: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Recompiling):
            told.append(f"{event.failures[0]}. {event.remedy}".rstrip())

    compiled = api.compile(f, backend="eager", **given)
    try:
        for args, kwargs in calls[:-1]:
            compiled(*args, **kwargs)
        with events.STREAM.listening(listen):
            args, kwargs = calls[-1]
            compiled(*args, **kwargs)
    except Exception:
        return ""
    return told[0] if told else ""


def _graph_program(f: Callable[..., Any], pair: Sequence[_Call], given: Mapping[str, Any]) -> str:
    """A program of the captured graph, where a guard on its inputs is what fails."""
    cases: list[_Case] = []
    for args, kwargs in pair:
        api.compile(f, **{**given, "backend": collector(cases), "dynamic": False})(*args, **kwargs)
    if len(cases) != 2 or len(cases[0].inputs) != len(cases[1].inputs):
        return ""
    ends = (replace(cases[0], seeded=True), replace(cases[1], graph=cases[0].graph, seeded=True))

    def fails(pair: Sequence[_Case]) -> bool:
        return bool(_recompile(pair[0].function(), [(one.arguments(), {}) for one in pair], given))

    if not fails(ends):
        return ""
    for step in (_one_output, _shorter, _smaller_both):
        tried = step(ends) if step is _smaller_both else zip(*map(step, ends))  # type: ignore[operator, arg-type]
        ends = next(filter(fails, tried), ends)
    return _calls_program(["", ends[0].source()], [(one.inputs, {}) for one in ends], given)


def _smaller_both(pair: Sequence[_Case]) -> Iterator[tuple[_Case, ...]]:
    """The sizes that both calls have."""
    sizes = [{size for one in case.inputs if isinstance(one, torch.Tensor) for size in one.shape} for case in pair]
    wanted = {size: index + 2 for index, size in enumerate(sorted(sizes[0] | sizes[1]))}

    def small(value: Any) -> Any:
        return value.new_zeros([wanted[size] for size in value.shape]) if isinstance(value, torch.Tensor) else value

    yield tuple(replace(case, inputs=tuple(map(small, case.inputs))) for case in pair)


def _source_program(f: Callable[..., Any], pair: Sequence[_Call], given: Mapping[str, Any]) -> str:
    """A program of the function's own text, less the statements that it can do without."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
    except (OSError, TypeError, SyntaxError):
        return ""
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not isinstance(f, types.FunctionType):
        return ""
    function.name, function.decorator_list = "f", []
    head = [_defined(name, f.__globals__[name]) for name in sorted(_names(f.__code__)) if name in f.__globals__]

    def fails(body: list[ast.stmt]) -> bool:
        function.body = body
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "part.py")
            file.write_text("\n".join(["import torch, fusewright", *head, ast.unparse(tree)]))
            try:
                names = runpy.run_path(str(file))
            except Exception:
                return False
            return bool(_recompile(names["f"], pair, given))

    body = function.body
    if not fails(body):
        return ""
    for statement in reversed(body):  # what reads a value goes before what makes it
        without = [one for one in body if one is not statement]
        body = without if without and fails(without) else body
    function.body = body
    return _calls_program([*filter(None, head), "", ast.unparse(tree)], pair, given)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def _defined(name: str, value: Any) -> str:
    """A statement that defines a global as the function sees it, where there is a short one."""
    if isinstance(value, types.ModuleType):
        return "" if name in ("torch", "fusewright") else f"import {value.__name__} as {name}"
    return f"{name} = {value!r}" if isinstance(value, (int, float, str, bool, tuple, type(None))) else ""


def _calls_program(head: Sequence[str], pair: Sequence[_Call], given: Mapping[str, Any]) -> str:
    texts = []
    for args, kwargs in pair:
        named = [f"{name}={_seeded_text(value)}" for name, value in kwargs.items()]
        texts.append(f"compiled({', '.join([*map(_seeded_text, args), *named])})")
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    made = f"compiled = fusewright.compile(f{arguments})"
    stance = 'fusewright.set_stance("fail_on_recompile")'
    return "\n".join(["import torch, fusewright", *head, "", made, texts[0], stance, texts[1], ""])
