"""The driver: what happens when a compiled function meets a call that no cache entry fits.

Takes one `compile` call's settings; captures the frame, hands its graph to the backend, and gives the native entry that
serves such calls from then on. Always holds: whatever goes wrong in here, the call still gives what eager gives, and an
event says so.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import importlib
import sys
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from fusewright import _native, forking
from fusewright.backends.agreement import agree
from fusewright.backends.registry import Backend, GraphToCompile, check_arguments, resolve
from fusewright.background import WORKER
from fusewright.base.break_catalogue import TRANSIENT_SKIPS
from fusewright.base.errors import (
    CacheWarning,
    CannotFunctionalise,
    FusewrightError,
    GraphBreakError,
    InternalErrorWarning,
    RecompileError,
    RecompileLimitWarning,
    RuntimeFallback,
    describe_break,
    warn,
)
from fusewright.base.events import (
    STREAM,
    Broken,
    Captured,
    Compiled,
    Ended,
    Event,
    FellBack,
    Hint,
    InternalError,
    LimitReached,
    PassDone,
    Recompiling,
    Reused,
    Served,
    Skipped,
    StageDone,
    Started,
    Subscriber,
)
from fusewright.base.location import callers_line, looping
from fusewright.base.options import Settings
from fusewright.base.records import replace
from fusewright.base.rewrites import Rewrites
from fusewright.base.signals import Deadline, GraphBreak, Signal, SkipFrame, memory_was_short, raised_by_handler
from fusewright.capture.attempt import capture_frame
from fusewright.capture.border.values.context import Surroundings
from fusewright.capture.bytecode.resume import in_loop
from fusewright.capture.conversions import converting, plain_sources, under_inference_mode
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards import Guard, build_program, guard_text, recompile_advice
from fusewright.capture.guards.sources import Item, Source
from fusewright.capture.interpret.speculation import TAKEN, differences
from fusewright.capture.settings import CaptureOptions, History
from fusewright.compile_cost import Costs
from fusewright.frame_policy import DISTRIBUTED_DATA_PARALLEL, FrameTable, policy
from fusewright.generalise.serve import Call, remembered, serve
from fusewright.operators.known_sizes import MARK
from fusewright.process import PROCESS, FunctionState, HandlersHeard, call_with_locals, function_name

CompiledFunction = _native.CompiledFunction
_native.hook_set_policy(policy)
forking.register()
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
_get_eval_frame = torch._C._dynamo.eval_frame.get_eval_frame_callback

_IMPORTS = "_fusewright_imports"  # an attribute of what is compiled: its last call ran eagerly with all that it called
IDLE_VERSIONS = 3
"""Versions without any tensor operation after which a function that nobody asked to compile (an eager region called it)
is let alone."""

# warnings are raised where the user has made errors of them
_TOLD = (FusewrightError, CacheWarning, RecompileLimitWarning)
_NOT_TOLD = (RuntimeFallback, CannotFunctionalise)


def _parameters(frame: CapturedFrame) -> frozenset[int]:
    """The positions of the graph's inputs that are parameters, or buffers of modules."""
    pairs = enumerate(zip(frame.inputs, frame.example_inputs, strict=True))
    return frozenset(at for at, (source, real) in pairs if isinstance(real, torch.nn.Parameter) or _is_buffer(source))


def _most_blamed(blame: Sequence[tuple[Guard | None, str]]) -> tuple[str, str]:
    """(failure, remedy) of the kind of guard that most versions failed on."""
    told = [(guard, failure) for guard, failure in blame if guard is not None]
    if not told:
        return blame[0][1] if blame else "nothing", ""
    (kind, _), *_ = Counter(guard.kind for guard, _ in told).most_common(1)
    guard, failure = next(one for one in told if one[0].kind == kind)
    return failure, recompile_advice(guard, failure).rstrip()


def _guard_texts(guards: tuple[Guard, ...]) -> tuple[str, ...]:
    return tuple(map(guard_text, guards))


def _is_buffer(source: Source) -> bool:
    return isinstance(source, Item) and isinstance(source.base, Item) and source.base.key == "_buffers"


def record_backward(*what: Any) -> Any:
    return importlib.import_module("fusewright.autograd.record").record_backward(*what)  # lazy: inference does without


def _eager_finish(outputs: object, function: types.FunctionType, *values: Any) -> Any:
    return call_with_locals(function, values)


class Compiler:
    """Compiles frames under one set of settings."""

    def __init__(self, settings: Settings, listener: Subscriber | None = None) -> None:
        self.settings = settings
        self.listener = listener  # hears the events of this compiler only
        self.backend: Backend = resolve(settings.backend)
        check_arguments(self.backend, settings)
        self.frames = FrameTable()
        self.frames.compiler = weakref.ref(self)
        PROCESS.compilers.add(self)
        self.history = History()
        self.deadline = Deadline(settings["compile_seconds"])
        self.costs = Costs(max(settings["cost_limit"], settings.recompile_limit) if settings["cost_limit"] else 0)
        options = CaptureOptions(
            fullgraph=settings.fullgraph,
            level="aten",
            dynamic=settings.dynamic if self.backend.dynamic else False,
            instruction_budget=settings["instruction_limit"],
            deadline=self.deadline,
            wrap_resume=self.wrap,
            call_eager=_native.call_eager,
            call_paused=_native.call_paused,
            differentiate=record_backward if self.backend.trains or self.backend.level == "torch" else None,
            follows_autograd=self.backend.level == "aten" and self.backend.follows_autograd,
            own_random=self.backend.own_random and not settings["fallback_random"],
            data_shapes=settings["capture_dynamic_output_shape_ops"],
            data_numbers=settings["capture_scalar_outputs"],
            speculates=settings["speculate"] and not settings.fullgraph,
            bucket={name: tuple(sizes) for name, sizes in settings.options.get("bucket", {}).items()},
        )
        above = replace(
            options, level="torch", differentiate=None, follows_autograd=True, own_random=False, speculates=False
        )
        if self.backend.level == "torch":
            self.options = replace(above, other_level=options if self.backend.lowers else None)
        else:
            self.options = replace(options, other_level=above if self.backend.trains else None)

    def wrap(self, function: Callable[..., Any]) -> Any:
        """A compiled function for a plain Python function. Nothing is compiled before its first call."""
        compiled = _native.CompiledFunction(function, self.miss)
        compiled.frames = self.frames
        functools.update_wrapper(compiled, function)
        PROCESS.compiled.add(compiled)
        return compiled

    def skip(self, name: str, code: str, detail: str) -> None:
        """Says that something is left to run eagerly. Raises GraphBreakError under fullgraph."""
        report = describe_break(code, detail, ())
        self.notify(Skipped(name, report))
        if self.settings.fullgraph:
            raise GraphBreakError(f"fullgraph=True, but {name} cannot be compiled.\n{report}", code)

    def miss(self, compiled: Any, function: types.FunctionType, values: tuple[Any, ...]) -> Any:
        """No entry of `compiled` fits this call: gives a new entry, or None to run the call eagerly.

        Raises what `base/errors.py` lists for users and nothing else: GraphBreakError under fullgraph, BackendError
        when the backend failed, RecompileError under that stance. What else goes wrong in capture or compilation ends
        here, and the call runs eagerly.
        """
        # No Python code takes the lock: a signal's handler, or the end of the stack, could come between taking it and
        # noting so. Nor does it put anything back.
        if self.settings["background"]:  # then a call does not wait for what another thread compiles
            return _native.call_if_free(PROCESS.lock, self._miss_alone, compiled, function, values)
        with PROCESS.lock:
            return self._miss_alone(compiled, function, values)

    def _miss_alone(self, compiled: Any, function: types.FunctionType, values: tuple[Any, ...]) -> Any:
        """`miss`, on the one thread that holds the lock."""
        heard, entries, made = HandlersHeard(), compiled.entries, None
        # torch.compile, where it calls what fusewright compiles, does not trace the compiler
        watcher = _get_eval_frame()
        try:
            _set_eval_frame(None)
            heard.listen()
            made = self._miss(compiled, function, values)
        except (Exception, Signal) as error:
            self._failed(compiled, function, heard.raised.pop(0) if heard.raised else error)
        finally:
            _set_eval_frame(watcher)
            _native.set_signal_handlers(heard.away)
        if heard.raised:  # and something has taken it for an answer: no more is known than before
            for entry in set(compiled.entries) - set(entries):
                compiled.remove(entry)
            PROCESS.states.setdefault(compiled, FunctionState()).skipped = False
            raise heard.raised.pop(0)
        return made

    def _miss(self, compiled: Any, function: types.FunctionType, values: tuple[Any, ...]) -> Any:
        for entry in compiled.entries:
            if not entry.retired and entry.program.check(values, function):  # another thread was quicker
                return entry
        for entry in compiled.entries:
            if entry.retired:
                compiled.remove(entry)
        state = PROCESS.states.setdefault(compiled, FunctionState())
        state.stage = "driver"
        compiled.hooked |= compiled.__dict__.pop(_IMPORTS, False)  # (its state may be another since: a reset)
        PROCESS.before_compile()
        if state.error is not None:
            error, state.error = state.error, None
            raise error
        state.skipped |= function.__globals__.get("__name__") == DISTRIBUTED_DATA_PARALLEL
        if state.skipped or any(program.check(values, function) for program in state.pending):
            return None
        name = self._name(function)
        entries = compiled.entries
        now = PROCESS.stance if PROCESS.stance != "default" else _native.torch_stance()
        if entries and now == "eager_on_recompile":
            return None
        if not entries and now in ("eager_then_compile", "aot_eager_then_compile") and not state.called:
            state.called = True
            return None
        full = len(entries) + len(state.pending) >= self.settings.recompile_limit
        if full and state.warned and now != "fail_on_recompile":
            return None  # each call comes here from now on: why it does has been said
        blame = [entry.program.failure(values, function) for entry in entries]
        failures = tuple(text for _, text in blame)
        if entries and now == "fail_on_recompile":
            raise RecompileError(
                f"{name} needs a recompile, and the stance is 'fail_on_recompile': {'; '.join(failures)}"
            )
        if len(entries) >= IDLE_VERSIONS and not state.works and type(compiled) is _native.FrameCache:
            state.skipped = True
            text = f"{IDLE_VERSIONS} versions have no tensor operation: it runs eagerly for new cases from now on"
            self.notify(Hint(name, text))
            return None
        cost = self.costs.refusal(function.__code__)
        if cost is not None and now != "fail_on_recompile":
            if cost:
                self._too_dear(name, cost)
            return None
        if full:
            self._limit_reached(state, name, blame, quiet=in_loop(function.__code__))
            return None
        if entries:
            versions, remedy = state.versions(entries), _most_blamed(blame)[1]
            self.notify(Recompiling(name, failures, state.compiles, versions, callers_line(), remedy))
        # A compile makes many objects that live on, and each full collection of cycles walks the whole heap.
        collects = gc.isenabled()
        gc.disable()
        self.notify(Started(name))
        surroundings = Surroundings()
        try:
            made = self._compile(compiled, state, name, function, values)
        except BaseException:
            surroundings.restore()
            raise
        finally:
            self.deadline.stop()
            if collects:
                gc.enable()
            self.notify(Ended(name))
        if made is not None:
            compiled.append(made)  # before the lock is free: who waits for it finds the entry
        return made

    def _too_dear(self, name: str, cost: str) -> None:
        """The event and the warning that a function is compiled no further."""
        self.notify(Skipped(name, describe_break("compile-cost", cost, ())))
        warn(
            f"{name} runs eagerly for new cases from now on: {cost}. Mend that break (see fusewright.explain), or "
            "leave the function out with fusewright.disable. options={'cost_limit': ...} allows more.",
            RecompileLimitWarning,
        )

    def _limit_reached(
        self, state: FunctionState, name: str, blame: list[tuple[Guard | None, str]], quiet: bool
    ) -> None:
        """An event, and a warning; not about a part of a loop (`quiet`), whose Python values change by nature: the loop
        runs on eagerly."""
        if state.warned:
            return
        state.warned = True
        limit = self.settings.recompile_limit
        self.notify(LimitReached(name, tuple(text for _, text in blame), limit))
        if quiet:
            return
        failure, remedy = _most_blamed(blame)
        advice = f"{remedy} " if remedy else ""
        warn(
            f"{name} was compiled {limit} times (recompile_limit) and runs eagerly for new cases from now on. "
            f"What kept failing: {failure}. {advice}Or raise recompile_limit.",
            RecompileLimitWarning,
        )

    def _compile(
        self, compiled: Any, state: FunctionState, name: str, function: types.FunctionType, values: tuple[Any, ...]
    ) -> Any:
        started = time.perf_counter()
        self.deadline.start()
        captured: list[CapturedFrame] = []

        def capture(several: bool) -> CapturedFrame:
            state.stage = "capture"
            return capture_frame(function, values, replace(self.options, ones=several), self.history)

        def announce(frame: CapturedFrame) -> None:
            state.stage = "compile"
            state.works |= frame.op_count > 0 or bool(frame.breaks)
            captured.append(frame)
            self._announce(name, frame, time.perf_counter() - started)

        def compile_(frame: CapturedFrame) -> Any:
            state.stage = "compile"
            state.compiles += 1
            if self.settings["background"] and frame.graph is not None:
                return self._compile_later(compiled, state, function, frame)
            return self._finish(name, frame, started)

        several = not self.settings["background"] and self.options.dynamic is not False
        try:
            served = serve(compiled.entries, Call(function, values, capture, announce, compile_, self._clean, several))
        except SkipFrame as signal:
            return self._skipped(compiled, state, name, signal)
        except GraphBreak as signal:
            if not self.settings.fullgraph:
                raise
            report = describe_break(signal.code, signal.detail, signal.stack)
            self.notify(Broken(name, report))
            raise GraphBreakError(f"fullgraph=True, but {name} has a graph break.\n{report}", signal.code) from None
        if captured:
            cost = self.costs.of(function.__code__)
            cost.note(compiled, served.entry, captured[-1], time.perf_counter() - started)
        if served.reused:
            self.notify(Reused(name, served.proof))
        if served.proof and served.entry.graph is not None:
            self.notify(Served(name, served.proof, served.entry, function, values, self.options))
        if served.other is not None:
            compiled.append(served.other)
        return served.entry

    def _skipped(self, compiled: Any, state: FunctionState, name: str, signal: SkipFrame) -> None:
        """The frame runs eagerly from now on. Raises GraphBreakError under fullgraph."""
        state.skipped = signal.code not in TRANSIENT_SKIPS
        if signal.code == "first-import" and compiled.hooked:  # the next call compiles what it calls in one piece
            compiled.hooked, compiled.__dict__[_IMPORTS] = False, True
        report = describe_break(signal.code, signal.detail, signal.stack)
        self.notify(Skipped(name, report))
        if self.settings.fullgraph and state.skipped:
            why = f"fullgraph=True, but {name} cannot be captured whole.\n{report}"
            raise GraphBreakError(why, signal.code) from None

    def _compile_later(
        self, compiled: Any, state: FunctionState, function: types.FunctionType, frame: CapturedFrame
    ) -> None:
        """Compiles a captured frame on the worker thread. Until it is ready, calls that it will serve run eagerly."""
        name = self._name(function)
        pending = build_program(frame.guards, plain_sources(frame.inputs)[0])
        state.pending.append(pending)

        def work() -> None:
            with PROCESS.lock:
                if PROCESS.states.get(compiled) is not state:
                    return  # there was a reset
                self.deadline.start()
                try:
                    compiled.append(self._finish(name, frame, time.perf_counter()))
                except (Exception, Signal) as error:
                    try:
                        if isinstance(error, SkipFrame):
                            self._skipped(compiled, state, name, error)
                        else:
                            self._failed(compiled, function, error)
                    except Exception as told:  # the caller's thread raises it at the next call
                        state.error = told
                finally:
                    self.deadline.stop()
                    state.pending.remove(pending)

        WORKER.submit(work)

    def _clean(self, graph: torch.fx.Graph) -> torch.fx.Graph:
        passes = importlib.import_module("fusewright.graph.passes")  # lazy: a start from the disk cache does without
        return passes.run(graph)

    def _finish(self, name: str, frame: CapturedFrame, started: float) -> Any:
        """The entry of a captured frame."""
        general = remembered(frame)
        entry = self._entry(name, frame)
        self.notify(Compiled(name, time.perf_counter() - started))
        if entry.graph is not None:
            entry.tag = general
        return entry

    def _failed(self, compiled: Any, function: types.FunctionType, error: BaseException) -> None:
        """A compile has ended with `error`, which is being handled: raises on what users are told; anything else is a
        defect of ours. Under fullgraph the user asked to know of it, otherwise the function runs eagerly."""
        if (isinstance(error, _TOLD) and not isinstance(error, _NOT_TOLD)) or raised_by_handler(error):
            raise error
        state, name = PROCESS.states.setdefault(compiled, FunctionState()), self._name(function)
        if isinstance(error, RecursionError):  # the program nests deeply, or calls from far down
            state.skipped = True
            with contextlib.suppress(RecursionError):
                self._skipped(compiled, state, name, SkipFrame("recursion", f"{state.stage}: {error}"))
            return
        if memory_was_short(error):
            with contextlib.suppress(MemoryError):
                self._skipped(compiled, state, name, SkipFrame("memory-short", f"{state.stage}: {error}"))
            return
        what = f"internal error in its {state.stage}: {type(error).__name__}: {error}"
        try:
            self.notify(InternalError(name, state.stage, traceback.format_exc()))
        except Exception as second:  # a full disk, say
            what += f" (nor could this be noted: {type(second).__name__}: {second})"
        state.skipped = True
        if self.settings.fullgraph:
            raise FusewrightError(f"{name} cannot be compiled: {what}") from error
        report = "Please report it with the output of FUSEWRIGHT_LOGS=internal_errors."
        warn(f"{name} runs eagerly: {what}. {report}", InternalErrorWarning)

    def _name(self, function: types.FunctionType) -> str:
        name = function_name(function)
        return name if self.settings.name is None else f"{self.settings.name}: {name}"

    def _announce(self, name: str, frame: CapturedFrame, seconds: float) -> None:
        if not STREAM.subscribers and self.listener is None:
            return
        for item in frame.breaks:
            self.notify(Broken(name, describe_break(item.code, item.detail, item.stack)))
        texts = functools.partial(_guard_texts, frame.guards)
        inputs = tuple(source.text() for source in frame.inputs)
        self.notify(
            Captured(name, frame.graph, texts, inputs, frame.finish_text, frame.op_count, seconds, frame.replayed)
        )
        if frame.graph is not None:
            for hint in unrolled_loops(frame.graph):
                self.notify(Hint(name, hint))

    def _entry(self, name: str, frame: CapturedFrame) -> Any:
        if frame.eager_reason:
            return self._eager_entry(name, frame, "training-eager", frame.eager_reason)
        compiled = None
        if frame.graph is not None:
            settings = self._agreed(name, frame.graph)
            graph = GraphToCompile(
                frame.graph,
                frame.constants,
                frame.example_inputs,
                name,
                settings,
                self.notify,
                frame.backward,
                parameters=_parameters(frame),
                rewrites=Rewrites(self.settings["stop_after_rewrites"]),
            )
            try:
                compiled = self._callable(graph, frame.level)
            except CannotFunctionalise as error:
                return self._eager_entry(name, frame, "no-pure-form", str(error))
        inputs, converted = plain_sources(frame.inputs)
        if compiled is not None and converted:
            compiled = converting(compiled, converted)
        if compiled is not None and frame.inference is not None:
            compiled = under_inference_mode(compiled, frame.inference)
        return _native.Entry(build_program((*frame.guards, *frame.later_guards()), inputs), compiled, frame.finish)

    def _agreed(self, name: str, graph: Any) -> Settings:
        """The settings, where all processes agree on the graph: without those that change its collectives elsewhere."""
        settings = self.settings
        varies = settings.dynamic is not False
        changed = {"join_collectives": False, "cut_collectives": 1}
        asked = [key for key, value in changed.items() if settings[key] != value]
        alike = agree(name, graph, lambda text: self.notify(Hint(name, text)), bool(asked))
        if not asked:
            return settings
        if alike and varies and "cut_collectives" in asked:
            self.notify(Hint(name, "option 'cut_collectives' needs dynamic=False: no product is cut"))
            changed = {"cut_collectives": 1}
        elif alike:
            return settings
        return replace(settings, options={**settings.options, **changed})

    def _callable(self, graph: GraphToCompile, level: str) -> Any:
        if level == self.backend.level:
            return self.backend.callable(graph)
        if level == "torch":
            why = "the graph runs operator by operator: gradients are wanted through sizes that depend on data"
            self.notify(Hint(graph.function, why))
            return resolve("eager").callable(graph)
        stage = importlib.import_module("fusewright.backends.aot")  # lazy, as the passes are
        return stage.lowered(self.backend, graph)

    def _eager_entry(self, name: str, frame: CapturedFrame, code: str, detail: str) -> Any:
        """An entry for calls that these guards accept, and that run eagerly."""
        report = describe_break(code, detail, ())
        self.notify(Skipped(name, report))
        if self.settings.fullgraph and code != "training-eager":
            raise GraphBreakError(f"fullgraph=True, but {name} cannot be compiled whole.\n{report}", code)
        return _native.Entry(build_program(frame.guards, plain_sources(frame.inputs)[0]), None, _eager_finish)

    def notify(self, event: Event) -> None:
        if isinstance(event, (StageDone, PassDone)):
            self.deadline.check()
        STREAM.emit(event)
        if self.listener is not None:
            self.listener(event)


LOOP_TURNS = 64
"""Turns past which an unrolled loop is worth a hint: capture and compile time grow with them."""


def unrolled_loops(graph: torch.fx.Graph) -> list[str]:
    """A hint for each line of a loop whose calls are in the graph more than LOOP_TURNS times."""
    # A call has a stack object of its own, which all the operators that it is made of share.
    turns: dict[Any, set[int]] = {}
    for node in graph.nodes:
        if node.op.startswith("call_") and node.meta.get("location"):
            turns.setdefault((node.meta["location"], node.target), set()).add(id(node.meta["location"]))
    most: dict[Any, int] = {}
    for (stack, _), calls in turns.items():
        line = looping(stack) if len(calls) > LOOP_TURNS else None
        if line is not None:
            most[line] = max(len(calls), most.get(line, 0))
    return [
        f"a loop is unrolled {count} times at {line}: compile its body, or write it as one tensor operation or "
        "torch.while_loop"
        for line, count in most.items()
    ]


def _fell_back(function: types.FunctionType, error: BaseException | None, entry: Any) -> None:
    place = "" if error is None else str(error).partition(MARK)[2].partition("\n")[0]
    if place:  # what the entry takes for granted differs: it is not taken for granted again
        entry.retired = True
        for compiler in list(PROCESS.compilers):
            if (place, TAKEN) in compiler.history:
                compiler.history[place, TAKEN] = ()
                differed = differences(function)
                compiler.history[differed] = (*compiler.history.get(differed, ()), 1)
    STREAM.emit(
        FellBack(
            function_name(function),
            str(error) if error is not None else "the guards of a new compile fail on its own call",
        )
    )


_native.set_fell_back(_fell_back)


def _left_alone(function: types.FunctionType) -> None:
    if STREAM.subscribers:
        detail = "a transform, a tracer or a mode is active on this thread"
        STREAM.emit(Skipped(function_name(function), describe_break("transform-active", detail, ())))


_native.set_left_alone(_left_alone)


def _restore(function: types.FunctionType, settings: Settings) -> Any:
    return Compiler(settings).wrap(function)


def _reduce(compiled: Any) -> Any:
    """Pickling: by its name where the compiled function stands under it, as plain functions do; else what to compile
    again."""
    found: Any = sys.modules.get(compiled.__module__)
    for part in compiled.__qualname__.split("."):
        found = getattr(found, part, None)
    compiler = getattr(compiled.miss, "__self__", None)
    if found is compiled or compiler is None:
        return compiled.__qualname__
    return _restore, (compiled.__wrapped__, compiler.settings)


copyreg.pickle(CompiledFunction, _reduce)
