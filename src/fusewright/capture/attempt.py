"""Capturing one frame: attempts of the tracer, and what a graph break makes of them.

Takes a function and the real values of its frame's arguments; gives a `CapturedFrame` up to the function's end or its
first graph break.
Always holds: a break starts a fresh attempt, with a new recorder and a new world, that stops in front of the breaking
instruction (so nothing is ever undone); whatever cannot be captured or cut raises SkipFrame, and the frame is to be run
eagerly.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.signals import READS_OF_DATA, Defect, GraphBreak, Retry, Signal, SkipFrame
from fusewright.capture import batch_of_one as ones
from fusewright.capture.assumptions import MOST_REFUSALS, Assumptions
from fusewright.capture.border.aliasing import written_placeholders
from fusewright.capture.border.dynamic import check_history, check_marks, check_results, size_guards_since
from fusewright.capture.border.hooked_results import check_hooked_results, register_all_later
from fusewright.capture.border.looked_up import are_written
from fusewright.capture.border.native import Interceptor
from fusewright.capture.border.values import tensor_number
from fusewright.capture.border.values.tensor import check_data
from fusewright.capture.border.witness import Witness
from fusewright.capture.border.world import World
from fusewright.capture.breaks import finish
from fusewright.capture.bytecode.resume import CannotCut, Resumption
from fusewright.capture.call import dispatch as calls
from fusewright.capture.call.autograd import computed_from
from fusewright.capture.call.collectives import finish_collectives
from fusewright.capture.call.output import check_filters
from fusewright.capture.call.support import saved_hooked
from fusewright.capture.frame import Backward, Break, CapturedFrame
from fusewright.capture.guards.sources import Local
from fusewright.capture.guards.torch_state import TENSOR_METHODS
from fusewright.capture.guards.types import Guard
from fusewright.capture.interpret.continuation import Continuation
from fusewright.capture.interpret.interpreter import Frame, Tracer
from fusewright.capture.interpret.predication import GUARDED
from fusewright.capture.interpret.speculation import Speculation
from fusewright.capture.settings import CaptureOptions, History
from fusewright.record.draws import Draws
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor, memory_root
from fusewright.sizes.expressions import Symbol
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.symfloat import float_of_size

__all__ = ["Frame", "Tracer", "capture_frame"]

# Python frames of ours per interpreted call (measured: 8 for a function, 14 for a module or a property), and some for
# what runs natively below the last.
_HOST_FRAMES_PER_CALL = 16


_OF_DATA = frozenset({"data-dependent-scalar", "data-dependent-shape"})
_DECISIONS = READS_OF_DATA | {"host-random"}


def capture_frame(
    function: types.FunctionType,
    arguments: tuple[object, ...],
    options: CaptureOptions,
    history: History | None = None,
) -> CapturedFrame:
    """Captures the frame of a call of `function`; `arguments` are its argument slots (positional, keyword-only, *args,
    **kwargs). history: of the captures before this one.

    Raises SkipFrame when the frame must run eagerly, and, under `options.fullgraph`, GraphBreak at the first break.
    """
    if not _native.modes_known():  # what is on would see the operators of the capture, and none of the compiled code's
        raise SkipFrame("transform-active", "a transform, a tracer or a mode is active")
    TENSOR_METHODS.number()
    if (replaced := TENSOR_METHODS.untraceable()) is not None:
        raise SkipFrame("tensor-attribute", f"{replaced} is not PyTorch's own")
    larger: set[Symbol] = set()
    try:
        with _deep_recursion(options), _own_saved_tensors():
            return _attempted(function, arguments, options, History() if history is None else history, larger)
    except Defect as signal:
        raise signal.error from None
    except Signal as signal:
        signal.takes_larger = bool(larger)
        raise


def _attempted(
    function: types.FunctionType,
    arguments: tuple[object, ...],
    options: CaptureOptions,
    history: History,
    larger: set[Symbol],
) -> CapturedFrame:
    """What the first attempt without a signal captures. `larger` gets the sizes of 1 that any attempt took to be larger
    ones."""
    assumptions = Assumptions()
    known = history.known_break(function.__code__)
    for _ in range(options.max_attempts + 1 + MOST_REFUSALS):
        other = options.other_level if assumptions.lacks_form >= 0 else None
        attempt = _Attempt(function, arguments, other or options, assumptions)
        attempt.tracer.history = history
        env = attempt.tracer.recorder.env
        taken = set() if env is None else env.taken
        attempt.tracer.known_break = None if assumptions.broken else known
        try:
            return attempt.run()
        except Retry as signal:
            assumptions = assumptions.after(signal, attempt.tracer.step)
            for code in assumptions.guarded:
                history[code, GUARDED] = ()
        except GraphBreak as signal:
            drawn = attempt.tracer.world.foreseen.calls
            if drawn and signal.code in _DECISIONS and not assumptions.foresees and not assumptions.broken:
                assumptions = replace(assumptions, foresees=True)
                continue
            if signal.code in _OF_DATA and not assumptions.data_sizes:
                signal.code = "data-dependent-gradient"
            # The break would cut each frame down to the import, for good; at the next call there is none.
            below = options.fullgraph or len(signal.stack) > 1
            if signal.code == "import" and below and history.tries(signal.detail):
                raise SkipFrame("first-import", signal.detail, signal.stack) from None
            if options.fullgraph:
                raise
            if 0 <= attempt.tracer.step <= assumptions.lacks_form:  # nor has it a form at the other level
                assumptions = replace(assumptions, changes_level=False, lacks_form=-1)
                continue
            if attempt.reached or attempt.tracer.step == 0:
                raise _skipped(assumptions.broken or signal, signal.detail) from None
            # Its traceback, and that of what caused it, would keep the attempt, and what it looked at, alive.
            signal.__cause__ = signal.__context__ = None
            signal.operators = signal.operators or attempt.tracer.recorder.op_count
            if signal.passed and not taken:
                history.note_breaks(signal)
            assumptions = replace(assumptions, broken=signal.with_traceback(None), stop_at=attempt.tracer.step - 1)
        except RecursionError as error:
            raise SkipFrame("recursion", str(error)) from None
        finally:
            larger |= taken
    found = assumptions.broken
    raise (
        _skipped(found, "the same frame breaks elsewhere each time it is captured")
        if found
        else SkipFrame("no-attempts")
    )


def _skipped(signal: GraphBreak, reason: str) -> SkipFrame:
    detail = signal.detail if reason in signal.detail else f"{signal.detail}; the frame cannot be split there: {reason}"
    skip = SkipFrame(signal.code, detail)
    skip.stack = signal.stack
    return skip


@contextmanager
def _deep_recursion(options: CaptureOptions) -> Iterator[None]:
    """Room on Python's stack: an interpreted call takes several calls of ours."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + options.inline_depth * _HOST_FRAMES_PER_CALL)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keeps the user's hooks on saved tensors (a checkpoint around the compiled function, say) from seeing traced
    ones."""
    if not saved_hooked():
        yield
        return
    torch._C._autograd._push_saved_tensors_default_hooks(_as_it_is, _as_it_is)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _later_guards(env: ShapeEnv | None) -> Callable[[], tuple[Guard, ...]]:
    if env is None:
        return tuple
    return functools.partial(size_guards_since, env, len(env.guards), frozenset(env.assumed))


class _Attempt:
    """One attempt. It stops in front of the break that its assumptions name, if any."""

    def __init__(
        self,
        function: types.FunctionType,
        arguments: tuple[object, ...],
        options: CaptureOptions,
        assumptions: Assumptions,
    ) -> None:
        self.broken = assumptions.broken
        self.reached = False
        self.tracer = tracer = Tracer(function, arguments, options, calls.call, assumptions)
        env = None if options.dynamic is False else ShapeEnv(tracer.stack)
        watched = options.ones and options.level == "aten"
        tracer.recorder = (Witness if watched else Recorder)(options.level, env, tracer.stack)
        tracer.recorder.draws = Draws() if options.own_random else None
        tracer.recorder.changes_level = options.other_level is not None and assumptions.changes_level
        if env is not None and assumptions.data_sizes:
            tracer.recorder.data_shapes, tracer.recorder.data_numbers = options.data_shapes, options.data_numbers
        tracer.recorder.unknown_shapes = options.level == "aten" and assumptions.unknown_shapes
        if options.speculates and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            # a call that is repeated would take part in collectives twice
            tracer.recorder.speculation = Speculation(tracer)
        tracer.branches.enabled = options.level == "aten" and options.dynamic is not False and assumptions.joins
        if env is not None and options.level == "aten":
            env.float_of = functools.partial(float_of_size, tracer.recorder, env)
        tracer.world = World(tracer)
        tracer.recorder.ask_number = functools.partial(tensor_number.ask, tracer.world)
        tracer.world.repeats.enabled = assumptions.replays
        tracer.world.may_infer = assumptions.inference
        tracer.world.wrappers.no_gradients = assumptions.no_gradients

    def run(self) -> CapturedFrame:
        world = self.tracer.world
        before = _native.set_interceptor(Interceptor(self.tracer))
        try:
            return self._captured(self.tracer.run(self._load_argument, self._cut))
        finally:
            _native.set_interceptor(before)
            world.close()
            world.forget()
            self.tracer.forget()
            self.tracer.recorder.ask_number = self.tracer.recorder.speculation = None
            env = self.tracer.recorder.env
            if env is not None:
                # PyTorch holds symbolic sizes where the collector of cycles does not look: nothing may lead from them
                # to the attempt.
                env.location, env.float_of = tuple, None  # what passes learn has no line of the user's

    def _load_argument(self, real: object, slot: int, name: str) -> Any:
        return self.tracer.world.load(real, Local(slot, name))

    def _cut(self, frame: Frame) -> Continuation:
        from fusewright.capture.breaks import cutting  # lazy: a frame without breaks does without

        self.reached = True
        assert self.broken is not None
        try:
            continuation = cutting.cut(frame, self.broken.code, self.broken.operators)
        except CannotCut as error:
            raise _skipped(self.broken, str(error)) from None
        resumed = any(isinstance(value, Resumption) for value in continuation.constants.values())
        if not resumed and not self.tracer.recorder.op_count:
            raise _skipped(self.broken, "there is no tensor operation before or after it")
        return continuation

    def _captured(self, continuation: Continuation) -> CapturedFrame:
        tracer = self.tracer
        recorder, world = tracer.recorder, tracer.world
        finish_collectives(tracer)
        check_history(world)
        check_filters(world)
        try:
            finished = finish.build(tracer, continuation)
        except GraphBreak:
            if tracer.assumptions.later_hooks:  # of which one cannot be made again behind the graph
                raise Retry(later_hooks=None) from None
            raise
        recorder.refuse_unasked = None  # from here on it is PyTorch and we who read tensors
        check_results(world, finished.outputs)
        if any(isinstance(value, torch.SymInt) and value.node.is_nested_int() for value in finished.outputs):
            raise SkipFrame("unsupported-tensor", "the length of a ragged dimension leaves the call")
        broken = self.broken if self.reached else None
        if broken is not None and recorder.level == "aten" and _asks_for_gradients(tracer.function):
            if any(computed_from(value) for value in finished.outputs):
                raise _skipped(broken, "it may ask for the gradient of a tensor that others are computed from")
        check_hooked_results(world, finished.outputs)
        if world.effects.handle_leaves:
            register_all_later(world)
            raise Retry(custom_gradients=False, gradient_refused="the handle of the hook leaves the function")
        breaks = () if broken is None else (Break(broken.code, broken.detail, broken.stack),)
        needed = bool(finished.outputs) or any(node.op.startswith("call_") for node in recorder.graph.nodes)
        example_inputs = tuple(value for _, value in recorder.inputs) if needed else ()
        before = finish.visible(tracer, continuation) if recorder.custom_gradients else None
        wants_gradients = _wants_gradients(recorder, finished.outputs)
        check_data(world, wants_gradients)
        inference = _inference(world, finished.outputs, wants_gradients)
        tracer.branches.check(finished.outputs, wants_gradients or recorder.identity_asked)
        backward, results, reason = self._differentiated(finished.outputs, wants_gradients)
        if reason and tracer.assumptions.later_hooks:
            raise Retry(later_hooks=None)
        if reason and tracer.assumptions.lacks_form >= 0:  # a break at that call leaves more to the compiler
            raise Retry(changes_level=False, lacks_form=-1)
        if reason and tracer.assumptions.custom_gradients and recorder.retains:
            raise Retry(custom_gradients=False, gradient_refused=reason)
        if before is not None and (reason or finish.visible(tracer, continuation) != before):
            register_all_later(world)
            raise Retry(custom_gradients=False, gradient_refused=reason or "it has effects beyond its result")
        if tracer.assumptions.custom_gradients and are_written(world, recorder.user_reads):
            raise Retry(custom_gradients=False, gradient_refused="the call writes to what it looks up")
        shown = None
        if recorder.env is not None and recorder.env.taken:
            watched = isinstance(recorder, Witness) and needed and backward is None and not reason and not breaks
            shown = watched and ones.shown(world, finished.outputs)
        graph = recorder.finish(results) if needed else None
        guards = world.guards()
        check_marks(recorder.env)
        return CapturedFrame(
            graph=graph,
            inputs=tuple(world.input_sources) if needed else (),
            guards=guards,
            finish=finished.function,
            finish_text=finished.text,
            breaks=breaks,
            op_count=recorder.op_count,
            example_inputs=example_inputs,
            constants={**recorder.constants, **recorder.submodules},  # type: ignore[dict-item]
            backward=backward,
            eager_reason=reason,
            repeats=world.repeats.count,
            replayed=tuple(
                f"{getattr(call.function, '__name__', 'call')}() at {call.where}"
                for call in world.effects.calls
                if call.where
            ),
            effects=finished.effects,
            later_guards=_later_guards(recorder.env),
            shown=shown,
            inference=inference,
            level=recorder.level,
        )

    def _differentiated(
        self, outputs: tuple[object, ...], wanted: bool
    ) -> tuple[Backward | None, tuple[object, ...], str]:
        """(the backward half, the graph's results: outputs and then gradients, why the call must run eagerly after
        all)."""
        recorder, options = self.tracer.recorder, self.tracer.options
        if options.follows_autograd or recorder.level == "torch" or not wanted:
            return None, outputs, ""
        if recorder.env is not None and recorder.env.unbacked:
            if options.fullgraph and recorder.changes_level:  # else a break leaves more to the compiler
                raise Retry(lacks_form=True)
            raise Retry(data_sizes=False)
        if options.differentiate is None:
            return None, outputs, "the backend has no backward"
        return options.differentiate(recorder, outputs)


def _asks_for_gradients(function: types.FunctionType) -> bool:
    """Whether the function's own code may ask for the gradients that arrive at a variable of its."""
    names = function.__code__.co_names
    if "retain_grad" in names or "register_hook" in names:
        return True
    if "backward" in names and any(type(one) is tuple and "inputs" in one for one in function.__code__.co_consts):
        return True
    return "grad" in names and ("autograd" in names or function.__globals__.get("grad") is torch.autograd.grad)


def _inference(world: World, outputs: tuple[object, ...], wants_gradients: bool) -> bool | None:
    """The inference mode that all of the graph runs under to give the kinds of tensors that eager gives; None if it is
    the caller's. A transform that takes gradients leaves the mode."""
    roots = [memory_root(value) for value in outputs if isinstance(value, TracedTensor)]
    kinds = {root.is_inference() for root in roots if not root.input_storage}
    if world.infers:
        if wants_gradients or False in kinds:
            raise Retry(inference=False)
        return True
    if False not in kinds or not torch.is_inference_mode_enabled() or world.recorder.level == "torch":
        return None
    if True in kinds or wants_gradients or written_placeholders(world.recorder.graph):
        raise SkipFrame("inference-mode", "a transform leaves inference mode for a part of what is computed")
    return False


def _wants_gradients(recorder: Recorder, outputs: tuple[object, ...]) -> bool:
    """Whether autograd has a part in what eager would give: an output that requires a gradient, or that is cut off from
    one which an input requires, or an input that was written to with its history kept."""
    for value in outputs:
        if isinstance(value, TracedTensor) and (value.requires_grad or memory_root(value).requires_grad):
            return True
    return any(recorder.history_changed(node) for node, _ in recorder.inputs)
