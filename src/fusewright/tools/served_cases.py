"""Whether a compile that serves a call by a proof does what a compile of just that call would do.

Takes the event that says so (`events.Served`); captures the frame once more with static sizes, runs that graph by
PyTorch's own operators, and the entry's code, both on random tensors laid out exactly as the call's are, and compares
values, types, strides, who shares memory with whom, gradients, and the whole memory of the inputs. Raises
ServedCaseError for a difference.
Always holds: the caller's tensors and PyTorch's generator are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusewright.backends import aot_eager, eager
from fusewright.backends.registry import GraphToCompile
from fusewright.base.errors import ServedCaseError
from fusewright.base.events import Event, Served
from fusewright.base.options import Settings
from fusewright.base.records import dataclass, field, replace
from fusewright.base.signals import Signal
from fusewright.capture.attempt import capture_frame
from fusewright.capture.conversions import converting, plain_sources
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards import evaluate
from fusewright.capture.settings import CaptureOptions

SEED = 20
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3, torch.complex128: 1e-7}
HALF_TOLERANCE = 3e-2


def listen(event: Event) -> None:
    """A subscriber of the event stream."""
    if isinstance(event, Served):
        check(event)


def check(case: Served) -> None:
    """Raises ServedCaseError where the entry does something else than a static capture of the same call."""
    try:
        frame = _static(case)
    except Signal:
        return  # the call cannot be captured with static sizes
    if frame.graph is None or frame.eager_reason:
        return
    random = any(node.meta.get("random") for node in frame.graph.nodes)
    sources, numbers = plain_sources(frame.inputs)
    given = [evaluate(source, case.values, case.frame) for source in sources]
    served = case.entry.program.inputs(case.values, case.frame)
    to_compile = GraphToCompile(
        frame.graph,
        frame.constants,
        frame.example_inputs,
        case.function,
        Settings(),
        lambda event: None,
        frame.backward,
    )
    plain = aot_eager.BACKEND if frame.level == "aten" else eager.BACKEND
    reference = converting(plain.compile(to_compile), numbers)
    differentiate = frame.backward is not None or (frame.level == "torch" and torch.is_grad_enabled())
    memory: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        expected = _run(reference, _Twins(memory), given, differentiate)
        found = _run(case.entry.graph, _Twins(memory), served, differentiate)
    difference = _difference(expected, found, random)
    if difference:
        raise ServedCaseError(f"{case.function}: {case.reason}, but a compile of this call alone differs: {difference}")


def _static(case: Served) -> CapturedFrame:
    options: CaptureOptions = replace(
        case.options, dynamic=False, ones=False, bucket={}, fullgraph=False, own_random=False,
    )  # fmt: skip
    return capture_frame(case.frame, case.values, options)


@dataclass(slots=True)
class _Twins:
    """Tensors laid out as others, over copies of one random memory, which all runs share as it is before them."""

    memory: dict[int, torch.Tensor]
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def of(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.copy()
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage()._cdata
        if key not in self.copies:
            self.copies[key] = self._copy(value, key)
        flat = self.copies[key]
        if flat.dtype != value.dtype:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(flat.untyped_storage())  # type: ignore
        twin = flat.as_strided(value.shape, value.stride(), value.storage_offset())
        return twin if twin.requires_grad or not value.requires_grad else twin.requires_grad_()

    def _copy(self, value: torch.Tensor, key: int) -> torch.Tensor:
        if key not in self.memory:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())  # type: ignore
            self.memory[key] = (
                torch.randn_like(flat) if flat.dtype.is_floating_point or flat.dtype.is_complex else flat.clone()
            )
        copy = self.memory[key].clone()
        if not value.requires_grad:
            return copy
        self.leaves.append(copy.requires_grad_())
        return copy * 1  # no leaf: it may be written to


@dataclass(frozen=True, slots=True)
class _Ran:
    """What one run gave: the results that are tensors (or the error), who shares memory, the gradients, and the inputs'
    memory."""

    error: Exception | None
    results: list[torch.Tensor]
    shared: list[int | None]
    gradients: list[torch.Tensor | None]
    memory: dict[int, torch.Tensor]


def _run(graph: Callable[..., Any], twins: _Twins, inputs: Sequence[Any], differentiate: bool) -> _Ran:
    given = [twins.of(value) for value in inputs]
    places = {flat.untyped_storage().data_ptr(): key for key, flat in twins.copies.items() if flat.numel()}
    try:
        results = [value for value in graph(*given) if isinstance(value, torch.Tensor)]
    except Exception as error:
        return _Ran(error, [], [], [], {})
    shared = []
    for number, result in enumerate(results):
        shared.append(places.setdefault(result.untyped_storage().data_ptr(), number) if result.numel() else None)
    gradients: list[torch.Tensor | None] = []
    wanted = [result for result in results if result.requires_grad]
    if differentiate and wanted and twins.leaves:
        torch.manual_seed(SEED)
        cotangents = [torch.randn(result.shape, dtype=result.dtype, device=result.device) for result in wanted]
        gradients = list(torch.autograd.grad(wanted, twins.leaves, cotangents, allow_unused=True))
    return _Ran(None, results, shared, gradients, {key: flat.detach() for key, flat in twins.copies.items()})


def _difference(expected: _Ran, found: _Ran, random: bool) -> str:
    """What tells two runs apart; "" where nothing does. Values are not compared where the program draws random
    numbers."""
    if expected.error is not None or found.error is not None:
        same = expected.error is not None and found.error is not None
        return "" if same else f"error {expected.error!r}, here {found.error!r}"
    if len(expected.results) != len(found.results):
        return f"{len(expected.results)} results, here {len(found.results)}"
    for number, pair in enumerate(zip(expected.results, found.results)):
        kinds = [(tuple(t.shape), t.dtype, t.device, t.requires_grad, _layout(t)) for t in pair]
        if kinds[0] != kinds[1]:
            return f"result {number} is {kinds[0]}, here {kinds[1]}"
    if expected.shared != found.shared:
        return f"memory is shared as {expected.shared}, here as {found.shared}"
    values: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [
        *zip([f"result {number}" for number in range(len(expected.results))], expected.results, found.results),
        *zip([f"gradient {number}" for number in range(len(expected.gradients))], expected.gradients, found.gradients),
        *(
            ("an input's memory", flat, found.memory[key])
            for key, flat in expected.memory.items()
            if key in found.memory
        ),
    ]
    for what, one, other in [] if random else values:
        difference = _unlike(one, other)
        if difference:
            return f"{what}: {difference}"
    return ""


def _layout(tensor: torch.Tensor) -> object:
    """Where elements lie, relative to the memory's beginning where that is an input's; of a tensor without elements
    nothing is asked."""
    if not tensor.numel():
        return ()
    return tensor.storage_offset(), [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]


def _unlike(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """How two tensors differ in their values; "" where they are close."""
    if one is None or other is None:
        left = one if one is not None else other
        return "" if left is None or not left.any() else "there is none in one of them"
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return "" if torch.equal(one, other) else "other values"
    tolerance = TOLERANCE.get(one.dtype, HALF_TOLERANCE)
    try:
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return str(error).replace("\n", " ")
    return ""
