"""Candidates on a GPU, measured: each as a native plan of its own, on made-up inputs of the real sizes.

Takes candidates (select/candidates.py); gives calls, their times by CUDA events, and why some are not measured. Always
holds: a candidate whose results differ from the first one's beyond the tolerance, or that cannot be compiled or loaded,
does not take part; the caller's random numbers are not touched; the cache is overwritten before each measurement, as
other kernels do between two runs of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field, replace
from fusewright.base.signals import memory_was_short
from fusewright.codegen.call_plan import build_call_plan
from fusewright.codegen.device_kernel import DeviceKernel, Processor, Unsupported
from fusewright.codegen.triton import generate
from fusewright.loops.ir import Buffer, Output, Store
from fusewright.runtime import cuda_code, launch
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.expressions import survey
from fusewright.schedule.plan import Plan, RunExtern, roots
from fusewright.select.candidates import Candidate, Question

FLUSHED = 4
"""Times the cache's size that is written between measurements (the processor has that long to issue the next call)."""
WRONG_ELEMENTS = 0.01
"""Share of integers and truth values that rounding may turn."""
LARGEST_ERROR = 8.0
"""Of one element, in tolerances of the largest element."""


def isolated(plan: Plan, candidate: Candidate, results: Sequence[str]) -> Plan:
    """The candidate's steps alone: what they read is an input, `results` are the outputs. Unsupported where a size is
    not a number."""
    known = {**plan.buffers, **{buffer.name: buffer for buffer in candidate.added}}
    written: set[str] = set()
    inputs: dict[str, None] = {}
    touched: dict[str, None] = {}
    for step in candidate.steps:
        if isinstance(step, RunExtern):
            reads = extern_reads(step.extern)
            writes = [name for name in step.extern.outputs if name is not None]
        else:
            kernel = candidate.kernels[step.kernel]
            reads = [name for name in kernel.buffers if name not in kernel.written]
            writes = [name for name in kernel.buffers if name in kernel.written]
        inputs.update((name, None) for name in reads if name not in written)
        written.update(writes)
        touched.update((name, None) for name in (*reads, *writes))
    buffers = {}
    role: Literal["input", "output", "temporary"]
    for name in touched:
        buffer = known[name]
        if not all(isinstance(d, int) for d in (*buffer.shape, *buffer.stride)):
            raise Unsupported("a size that is not a number")
        role = "input" if name in inputs else "output" if name in results else "temporary"
        position = list(inputs).index(name) if name in inputs else -1
        buffers[name] = replace(buffer, role=role, position=position, offset=0)
    outputs = tuple(Output("buffer", name) for name in results)
    steps = tuple(step if isinstance(step, RunExtern) else replace(step, horizontal=False) for step in candidate.steps)
    return Plan(dict(candidate.kernels), buffers, steps, tuple(inputs), outputs)


def factors(question: Question) -> frozenset[str]:
    """The buffers that are multiplied as they are: what stands there has both signs. Other numbers may be variances,
    say."""
    first = question.candidates[0]
    found = {name for step in first.steps if isinstance(step, RunExtern) for name in extern_reads(step.extern)}
    made = [kernel.product for kernel in first.kernels.values() if kernel.product is not None]
    return frozenset(
        found.union(side.buffer for product in made for side in (product.left, product.right) if side.value is None)
    )


def positions(question: Question) -> frozenset[str]:
    """The buffers from which kernels take places in memory."""
    found: set[str] = set()
    for kernel in {
        kernel.name: kernel for candidate in question.candidates for kernel in candidate.kernels.values()
    }.values():
        values = [value for stage in kernel.stages for statement in stage.statements for value in roots(statement)]
        bound = [value for load in survey(values).loads for _, value in load.bindings]
        stores = [s for stage in kernel.stages for s in stage.statements if isinstance(s, Store)]
        bound += [value for store in stores for _, value in store.bindings]
        found.update(load.buffer for load in survey(bound).loads)
        if survey(bound).locals:  # what a name stands for is not followed
            found.update(kernel.buffers)
    return frozenset(found)


def made_up(buffer: Buffer, generator: torch.Generator, signed: bool, places: bool) -> torch.Tensor:
    """A tensor for an input: random numbers of about 1; bytes, but zeros where they may be positions (`places`) and in
    wide integers."""
    span = buffer.span()
    assert isinstance(span, int)
    if buffer.element.is_floating_point:
        flat = torch.empty(span, dtype=buffer.element, device=buffer.device)
        flat = flat.normal_(generator=generator) if signed else flat.uniform_(0.5, 1.5, generator=generator)
    elif (
        buffer.element in (torch.int8, torch.uint8) and not places
    ):  # a quantised weight: of zeros, every result would be right
        flat = torch.randint(1, 100, (span,), dtype=buffer.element, device=buffer.device, generator=generator)
    else:
        flat = torch.zeros(span, dtype=buffer.element, device=buffer.device)
    if buffer.dtype.is_complex:
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(buffer.shape, buffer.stride)  # type: ignore[arg-type]


def disagreement(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """How the two differ beyond the tolerance; nothing when they agree."""
    if not expected.dtype.is_floating_point:
        wrong = (actual != expected).float().mean().item()
        return f"{wrong:.1%} of its elements differ" if wrong > WRONG_ELEMENTS else ""
    a, b = actual.float(), expected.float()
    finite = torch.isfinite(b)
    odd = (torch.isfinite(a) != finite).float().mean().item()
    if odd > WRONG_ELEMENTS / 10:
        return f"{odd:.1%} of its elements are not finite where the library's are, or the other way round"
    both = finite & torch.isfinite(a)
    a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    size = b.norm().item()
    error = (a - b).norm().item()
    if not error <= tolerance * size + 1e-12:
        return f"its relative error is {error / max(size, 1e-30):.1e}"
    worst, largest = (a - b).abs().max().item(), b.abs().max().item()
    return (
        ""
        if worst <= LARGEST_ERROR * tolerance * largest + 1e-12
        else f"one element is {worst:.1e} off (the largest is {largest:.1e})"
    )


@contextmanager
def plain_mode() -> Iterator[None]:
    """What the user's program has switched on does not change a trial."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@dataclass(slots=True)
class GpuAutotuner:
    """`plan`: whose kernels are tried. Not for several threads."""

    plan: Plan
    device: torch.device
    processor: Processor
    machine: str
    codes: dict[int, dict[str, DeviceKernel]] = field(default_factory=dict)
    flush: torch.Tensor | None = None

    def _codes(self, candidate: Candidate) -> dict[str, DeviceKernel]:
        """Raises Unsupported."""
        found = self.codes.get(id(candidate))
        if found is None:
            buffers = {**self.plan.buffers, **{buffer.name: buffer for buffer in candidate.added}}
            kernels = list(candidate.kernels.values())
            found = self.codes[id(candidate)] = generate(kernels, buffers, self.processor, candidate.tiles)
        return found

    def request(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            try:
                cuda_code.request(self._codes(candidate).values(), cuda_code.processor(self.device.index or 0).arch)
            except Unsupported:
                continue  # `prepare` says so

    def refuses(self, candidate: Candidate) -> bool:
        try:
            return any(cuda_code.refusal(code.key, self.device.index or 0) for code in self._codes(candidate).values())
        except Unsupported:
            return True

    def _was_of_the_moment(self, candidate: Candidate) -> bool:
        """Whether a kernel of the candidate was refused for a reason that says nothing of it."""
        codes = self.codes.get(id(candidate), {}).values()
        return any(cuda_code.may_come(code.key, self.device.index or 0) for code in codes)

    def prepare(self, question: Question) -> tuple[list[tuple[str, Any]], dict[str, str], bool]:
        calls: list[tuple[str, Any]] = []
        short = False
        refused: dict[str, str] = {}
        expected: tuple[torch.Tensor, ...] = ()
        tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.cuda.device(self.device), plain_mode():
            try:
                self._make_flush()
            except torch.OutOfMemoryError as error:
                return [], {candidate.name: str(error).splitlines()[0] for candidate in question.candidates}, True
            for candidate in question.candidates:
                try:
                    call, results = self._tried(candidate, question, tensors, generator)
                    pairs = zip(results, expected, strict=True) if calls else ()
                    wrong = [text for a, b in pairs if (text := disagreement(a, b, question.tolerance))]
                except (
                    Unsupported,
                    RuntimeError,
                    ValueError,
                ) as error:  # refused by Triton, the driver or the plan; or no memory
                    short = short or memory_was_short(error) or self._was_of_the_moment(candidate)
                    refused[candidate.name] = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                    if not calls:  # without the library's result there is nothing to compare with
                        return [], refused, short
                    continue
                if not calls:
                    expected = results
                if wrong:
                    refused[candidate.name] = f"wrong: {wrong[0]}"
                else:
                    calls.append((candidate.name, call))
        return calls, refused, short

    def _tried(
        self, candidate: Candidate, question: Question, tensors: dict[str, torch.Tensor], generator: torch.Generator
    ) -> tuple[Callable[[], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        """(the candidate's call, its results). Memory that is short is sought in PyTorch's cache first."""

        def run() -> tuple[Callable[[], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
            call = self._call(candidate, question, tensors, generator)
            results = call()
            torch.cuda.synchronize(self.device)
            return call, results

        try:
            return run()
        except RuntimeError as error:
            if not memory_was_short(error):
                raise
        torch.cuda.empty_cache()
        return run()

    def _call(
        self, candidate: Candidate, question: Question, tensors: dict[str, torch.Tensor], generator: torch.Generator
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        codes = self._codes(candidate)
        mine = isolated(self.plan, candidate, question.results)
        call_plan = build_call_plan(mine, codes, name=candidate.name, available=launch.is_available)
        index = self.device.index or 0
        native = launch.load(call_plan, cuda_code.load({(code.key, index) for code in codes.values()}))
        missing = [name for name in mine.inputs if name not in tensors]
        if missing:
            signed, places = factors(question), positions(question)
            tensors.update(
                {name: made_up(mine.buffers[name], generator, name in signed, name in places) for name in missing}
            )
        inputs = [tensors[name] for name in mine.inputs]
        return lambda: native(*inputs)

    def _make_flush(self) -> torch.Tensor:
        if self.flush is None:
            size = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(max(FLUSHED * size, 1 << 26), dtype=torch.uint8, device=self.device)
        return self.flush

    def measure(self, calls: Sequence[Any], rounds: int) -> list[list[float]]:
        """Raises RuntimeError where a call fails, such as torch.OutOfMemoryError: memory that is short is sought in
        PyTorch's cache first."""
        try:
            return self._measured(calls, rounds)
        except RuntimeError as error:
            if not memory_was_short(error):
                raise
        torch.cuda.empty_cache()
        return self._measured(calls, rounds)

    def _measured(self, calls: Sequence[Any], rounds: int) -> list[list[float]]:
        with torch.cuda.device(self.device), plain_mode():
            flush = self._make_flush()
            events = [
                [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
                for _ in range(rounds)
            ]
            for pairs in events:
                for (begin, end), call in zip(pairs, calls):
                    flush.zero_()
                    begin.record()
                    call()
                    end.record()
            torch.cuda.synchronize(self.device)
            return [[pairs[k][0].elapsed_time(pairs[k][1]) * 1e-3 for pairs in events] for k in range(len(calls))]


def machine_text(index: int) -> str:
    """What an answer depends on beside the question."""
    versions = f"torch {torch.__version__} {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(index)} {cuda_code.machine_text(index)} {versions}"
