"""`fusewright.check`: is a model fit for production? Graph breaks, accuracy, recompiles, memory, warm-up, speed.

Takes a model and example arguments; gives a `Check` that prints as a table, with a verdict. Always holds: the model is
copied, never changed; each row says what was measured, and what to do about it where it is not well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree

from fusewright import _native, api
from fusewright.base import events
from fusewright.base.errors import FusewrightError, OptionError
from fusewright.base.records import dataclass, field
from fusewright.tools import bench, memory
from fusewright.tools.bundle import bytes_text
from fusewright.tools.explain import Report

Status = Literal["ok", "warning", "failure"]
VERSIONS = 3
"""One for the example's sizes, one for changing sizes, one for a case apart (a batch of 1)."""
NO_GAIN = 0.98
"""Speed-ups below are a loss; what lies between is noise."""
NEGLIGIBLE = 1e-6
WORSE = 2.0
"""Errors against float64 up to so many times eager's are rounding: sums are added in another order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, how it stands, in words, and the figures behind it."""

    name: str
    status: Status
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.status}: {self.text}"


@dataclass(slots=True)
class Check:
    """The findings in order. Prints as a table."""

    findings: list[Finding] = field(default_factory=list)

    def __getitem__(self, name: str) -> Finding:
        """The finding of this name."""
        return next(finding for finding in self.findings if finding.name == name)

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        found = {finding.status for finding in self.findings}
        return "failure" if "failure" in found else "warning" if "warning" in found else "ok"

    @property
    def exit_status(self) -> int:
        """For a shell: 1 if something failed, else 0."""
        return int(self.status == "failure")

    @property
    def verdict(self) -> str:
        """One sentence."""
        bad = [finding.name for finding in self.findings if finding.status == self.status]
        return {
            "ok": "ready: nothing speaks against it",
            "warning": f"works, and could be better: {', '.join(bad)}",
            "failure": f"not ready: {', '.join(bad)}",
        }[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        rows = [{"name": f.name, "status": f.status, "text": f.text, "data": dict(f.data)} for f in self.findings]
        return {"status": self.status, "verdict": self.verdict, "findings": rows}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for finding in self.findings:
            first, *rest = finding.text.splitlines() or [""]
            rows += [(finding.name, finding.status, first), *(("", "", line) for line in rest)]
        return f"{bench.table(rows)}\n\n{self.verdict}"

    __repr__ = __str__


def check(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    shapes: Sequence[Any] = (),
    torch_compile: bool = False,
    seconds: float = 2.0,
    **compile_arguments: Any,
) -> Check:
    """Goes through the production checklist: compiles copies of `model`, and compares them with eager.

    args, kwargs   example arguments of one call
    shapes         further sizes to try, in the order in which they come: each the shape of the first tensor argument, a
                   tuple of shapes of all of them, or a tuple of arguments
    torch_compile  time torch.compile as well
    seconds        time for measuring the speed
    others         arguments of `compile`; something compiled is checked under its own settings

    A module in training mode is checked with its backward (gradients of the sum of its outputs), anything else in
    inference, unless an argument requires gradients. What eager raises for the example is raised.
    """
    return _Checker(model, tuple(args), dict(kwargs or {}), compile_arguments).run(shapes, torch_compile, seconds)


class _Checker:
    """One check: the eager model, the arguments, and how to make a compiled copy."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs, self.arguments = model, args, kwargs, arguments
        owner = _module_of(api._original(model))
        learns = owner is not None and owner.training and any(p.requires_grad for p in owner.parameters())
        self.trains = torch.is_grad_enabled() and (learns or any(t.requires_grad for t in _tensors((args, kwargs))))
        self.random = bench.is_random(model, args, kwargs)

    def compiled(self, **options: Any) -> Any:
        """A compiled copy of the model. `options` are added to the user's."""
        settings, arguments = api._settings_of(self.model), dict(self.arguments)
        if settings is not None and not arguments and not options:
            return api._recompile(settings, bench.eager_copy(self.model))
        if options:
            arguments["options"] = {**(arguments.get("options") or {}), **options}
        return api.compile(bench.eager_copy(self.model), **arguments)

    def step(self, function: Any, args: Any = None, kwargs: Any = None) -> Callable[[], Any]:
        """A call of `function` on copies of the arguments, and its backward where it is trained: gives the outputs and
        the gradients."""
        own_args, own_kwargs = bench.copy_of((self.args, self.kwargs) if args is None else (args, kwargs))
        owner = _module_of(function)
        wanted = [*(owner.parameters() if owner is not None else ()), *_tensors((own_args, own_kwargs))]

        def run() -> Any:
            with torch.set_grad_enabled(self.trains):
                outputs = function(*own_args, **own_kwargs)
            losses = [_loss(leaf) for leaf in _tensors(outputs) if self.trains and leaf.requires_grad]
            gradients = []
            if losses:
                torch.stack(losses).sum().backward()
                for tensor in wanted:
                    gradients.append(tensor.grad)
                    tensor.grad = None
            return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), gradients

        return run

    def run(self, shapes: Sequence[Any], torch_compile: bool, seconds: float) -> Check:
        """All findings."""
        made = Check()
        expected = bench.seeded(self.step(bench.eager_copy(self.model)))
        report = Report()
        try:
            _native.hook_reset()  # what earlier compiles reached through a graph break is captured anew
            with events.STREAM.listening(report.listen):
                compiled = self.compiled()
                got: list[Any] = []
                first = self.step(compiled)
                warm_up = bench.seconds_of(lambda: got.append(bench.seeded(first)))
        except FusewrightError as error:
            made.findings.append(Finding("compile", "failure", f"{type(error).__name__}: {error}"))
            return made
        made.findings += [_compile(report, warm_up), _breaks(report), self.accuracy(expected, got[0])]
        if shapes:
            made.findings.append(self.over_shapes(compiled, shapes))
        made.findings += [self.memory(), self.speed(compiled, torch_compile, seconds)]
        return made

    def accuracy(self, expected: Any, got: Any) -> Finding:
        """Compiled beside eager, and both beside the same model in float64."""
        if self.random:
            got = bench.seeded(self.step(self.compiled(fallback_random=True)))
        close = bench.same(got, expected)
        data: dict[str, Any] = {"close_to_eager": close, "largest_difference": _largest_difference(got, expected)}
        what = "outputs and gradients" if self.trains else "outputs"
        lines = [f"{what} {'agree' if close else 'DIFFER'}: at most {data['largest_difference']:.2g} from eager's"]
        status: Status = "ok" if close else "failure"
        reference, problem = self.in_float64()
        if problem:
            lines.append(f"not compared with float64: {problem}")
        else:
            ours, theirs = _error(got, reference), _error(expected, reference)
            nearer = "neither is" if ours == theirs else "compiled is" if ours < theirs else "eager is"
            data |= {"compiled_error": ours, "eager_error": theirs}
            lines.append(f"relative error to float64: compiled {ours:.2g}, eager {theirs:.2g}: {nearer} nearer")
            if not close and _same_form(got, expected) and ours <= WORSE * theirs:
                status = "ok"
                lines.append("the difference is rounding: compiled is about as near to float64 as eager")
        if status == "failure":
            lines.append("find the stage at fault as docs/explain.md says, and report it")
        return Finding("accuracy", status, "\n".join(lines), data)

    def in_float64(self) -> tuple[Any, str]:
        """The result in float64, or why there is none."""
        if self.random:
            return None, "the model draws random numbers"
        model = bench.eager_copy(self.model)
        owner = _module_of(model)
        if owner is not None:
            owner.double()
        args, kwargs = _pytree.tree_map_only(torch.Tensor, _widened, (self.args, self.kwargs))
        try:
            return bench.seeded(self.step(model, args, kwargs)), ""
        except Exception as error:  # a model that names its dtypes may fail in others in any way
            return None, f"the model does not run in it ({type(error).__name__}: {str(error).splitlines()[0]:.100})"

    def over_shapes(self, compiled: Any, shapes: Sequence[Any]) -> Finding:
        """Results and recompiles over further sizes, in their order."""
        compiles: Counter[str] = Counter()
        causes: list[str] = []
        limits: list[str] = []
        wrong: list[str] = []
        lines: list[str] = []

        def listen(event: events.Event) -> None:
            compiles[event.function] += isinstance(event, events.Compiled)
            if isinstance(event, events.Recompiling):
                causes.extend(event.failures[-1:])
            elif isinstance(event, events.LimitReached):
                limits.append(event.function)

        eager = bench.eager_copy(self.model)
        for shape in shapes:
            args, name = _arguments(shape, self.args)
            before = compiles.total()
            expected, refusal = _outcome(self.step(eager, args, self.kwargs))
            with events.STREAM.listening(listen):
                got, error = _outcome(self.step(compiled, args, self.kwargs))
            agrees = error == refusal and (self.random or bench.same(got, expected))
            if not agrees:
                wrong.append(name)
            told = f"raises {refusal}" if refusal and agrees else "agrees" if agrees else f"DIFFERS {error}".rstrip()
            lines.append(f"{name}: {_count(compiles.total() - before, 'compile')}, {told}")
        most = 1 + max(compiles.values(), default=0)
        status: Status = "failure" if wrong else "warning" if limits or most > VERSIONS else "ok"
        head = f"{_count(len(shapes), 'further size')}: {_count(compiles.total(), 'compile')}"
        if status == "warning":
            lines.append(f"last cause: {causes[-1] if causes else 'none'}")
            lines.append("mark the sizes that change: dynamic=True, or fusewright.mark_dynamic")
        data = {"compiles": compiles.total(), "wrong": wrong, "causes": causes, "versions": most}
        return Finding("recompiles", status, "\n".join([head, *lines]), data)

    def memory(self) -> Finding:
        """The memory of a call, eager and compiled."""
        eager, compiled = self.step(bench.eager_copy(self.model)), self.step(self.compiled())
        eager()
        ours, theirs = memory.measure_compiled(compiled), memory.measure(eager)
        more = ours.peak > 1.1 * theirs.peak + ours.kept + (1 << 20)
        text = f"peak of a call: eager {bytes_text(theirs.peak)}, compiled {bytes_text(ours.peak)}"
        if ours.kept:
            text += f", {bytes_text(ours.kept)} of it kept between calls (pack_weights=False does without)"
        data = {"eager_peak": theirs.peak, "compiled_peak": ours.peak, "compiled_kept": ours.kept}
        return Finding("memory", "warning" if more else "ok", text, data)

    def speed(self, compiled: Any, torch_compile: bool, seconds: float) -> Finding:
        """Steady speed, by turns."""
        functions = {"eager": bench.eager_copy(self.model), "compiled": compiled}
        if torch_compile:
            functions["torch.compile"] = _by_torch_compile(bench.eager_copy(self.model))
        steps = {name: self.step(function) for name, function in functions.items()}
        first = {name: bench.seconds_of(call) for name, call in steps.items()}
        timed = bench.summary(*bench.compare_times(steps, seconds), first, {})
        gains = {name: timing.speedup for name, timing in timed.timings.items()}
        lines = [
            f"{name}: {bench.milliseconds(timing.median_ms)} ({timing.speedup:.2f}x)"
            + (f", first call {timing.first_call_s:.1f} s" if name == "torch.compile" else "")
            for name, timing in timed.timings.items()
        ]
        status: Status = "ok" if gains["compiled"] >= NO_GAIN else "warning"
        return Finding("speed", status, "\n".join(lines), timed.to_dict())


def _module_of(function: Any) -> torch.nn.Module | None:
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


def _loss(output: torch.Tensor) -> torch.Tensor:
    """Its gradient differs from element to element: that of a plain sum would vanish behind a softmax or a norm."""
    weights = torch.arange(output.numel(), device=output.device, dtype=torch.float64).add(1).cos()
    return (output.flatten() * weights.to(output.dtype)).abs().sum().double()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if tensor.is_floating_point() else torch.complex128 if tensor.is_complex() else tensor.dtype
    return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)


def _by_torch_compile(function: Any) -> Any:
    return torch.compile(function)


def _compile(report: Report, warm_up: float) -> Finding:
    text = f"first call {bench.milliseconds(warm_up * 1e3)}: {_count(report.graph_count, 'graph')}"
    text += f", {_count(report.op_count, 'operator')}, {_count(len(report.kernels), 'kernel')}"
    data = {
        "first_call_s": warm_up,
        "graphs": report.graph_count,
        "operators": report.op_count,
        "kernels": len(report.kernels),
        "hints": report.hints,
        "errors": report.errors,
    }
    lines = [text, *(f"hint: {hint}" for hint in report.hints)]
    lines += [f"internal error: {error.strip().splitlines()[-1]}" for error in report.errors]
    return Finding("compile", "failure" if report.errors else "ok", "\n".join(lines), data)


def _breaks(report: Report) -> Finding:
    reasons = [str(reason) for reason in report.break_reasons]
    text = "\n".join([_count(len(reasons), "graph break") if reasons else "none", *reasons])
    return Finding("graph breaks", "warning" if reasons else "ok", text, {"count": len(reasons), "reasons": reasons})


def _outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or which exception it raises."""
    try:
        return bench.seeded(call), ""
    except Exception as error:  # whatever eager raises for a size, compiled code shall raise as well
        return None, type(error).__name__


def _arguments(shape: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], str]:
    """Arguments of other sizes, and their name. A size repeats or cuts the example's elements: indices stay in
    range."""
    if not isinstance(shape, (tuple, list)):
        raise OptionError(f"check takes shapes as tuples, got {shape!r}")
    if any(isinstance(each, torch.Tensor) for each in shape):
        return tuple(shape), " ".join(str(tuple(tensor.shape)) for tensor in _tensors(shape))
    wanted = [shape] if all(isinstance(size, int) for size in shape) else list(shape)
    made = list(args)
    places = [position for position, each in enumerate(args) if isinstance(each, torch.Tensor)]
    if len(wanted) > len(places):
        raise OptionError(f"check got {len(wanted)} shapes for {len(places)} tensor arguments: {shape!r}")
    for position, sizes in zip(places, wanted):
        example = args[position].detach().reshape(-1)
        count = torch.Size(sizes).numel()
        index = torch.arange(count, device=example.device) % max(1, example.numel())
        made[position] = example[index].reshape(sizes).requires_grad_(args[position].requires_grad)
    return tuple(made), " ".join(str(tuple(sizes)) for sizes in wanted)


def _same_form(got: Any, expected: Any) -> bool:
    """Whether results differ in finite numbers only."""
    (left, left_spec), (right, right_spec) = _pytree.tree_flatten(got), _pytree.tree_flatten(expected)
    return left_spec == right_spec and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_special(a), _special(b))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a is b is None or bool(a == b)
        for a, b in zip(left, right)
    )


def _special(value: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return torch.stack((real.isnan(), real == float("inf"), real == float("-inf")))


def _largest_difference(got: Any, expected: Any) -> float:
    pairs = zip(_tensors(got), _tensors(expected))
    return max((_distance(a, b, float("inf")) for a, b in pairs if a.shape == b.shape), default=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor, order: float) -> float:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    difference = torch.nan_to_num((a.to(wide) - b.to(wide)).abs().flatten(), nan=0.0, posinf=0.0)
    return float(torch.linalg.vector_norm(difference, order)) if difference.numel() else 0.0


def _error(got: Any, reference: Any) -> float:
    """The largest relative error of a tensor: the norm of the difference over the norm. What is all but zero beside the
    other tensors counts as large as they are: its own size is rounding."""
    pairs = [(a, b) for a, b in zip(_tensors(got), _tensors(reference)) if b.is_floating_point() or b.is_complex()]
    norms = [_distance(b, torch.zeros_like(b), 2) for _, b in pairs]
    least = max(NEGLIGIBLE * max(norms, default=0.0), 1e-300)
    errors = (_distance(a, b, 2) / max(norm, least) for (a, b), norm in zip(pairs, norms) if a.shape == b.shape)
    return max(errors, default=0.0)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
