"""Checks of the frame hook that need no torch: what it does beside debuggers, profilers, coverage tools and other frame
evaluators, and while the interpreter does something by itself."""

from __future__ import annotations

import contextlib
import cProfile
import ctypes
import functools
import gc
import itertools
import mmap
import os
import pdb
import platform
import random
import signal
import struct
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.native.native_hook_checks import Policy, double, outer
from tests.native.native_support import N, check, raises, type_program


@contextlib.contextmanager
def traced(seen: list[str]) -> Iterator[None]:
    def tracer(frame, event, arg):
        seen.append(frame.f_code.co_name)
        return tracer

    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def profiled(seen: list[str]) -> Iterator[None]:
    sys.setprofile(lambda frame, event, arg: seen.append(frame.f_code.co_name))
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def profiled_natively(seen: list[str]) -> Iterator[None]:
    with cProfile.Profile() as profile:
        yield
    seen += [entry.code.co_name for entry in profile.getstats() if not isinstance(entry.code, str)]


@contextlib.contextmanager
def monitored(seen: list[str], tool: int, codes: tuple[types.CodeType, ...]) -> Iterator[None]:
    """Lines of `codes`, or of all code, as a debugger (tool 0) or a coverage tool (1) of Python 3.12 hears of them."""
    monitoring = sys.monitoring
    monitoring.use_tool_id(tool, "a tool")
    monitoring.register_callback(tool, monitoring.events.LINE, lambda code, line: seen.append(code.co_name))
    for code in codes:
        monitoring.set_local_events(tool, code, monitoring.events.LINE)
    if not codes:
        monitoring.set_events(tool, monitoring.events.LINE)
    try:
        yield
    finally:
        for code in codes:
            monitoring.set_local_events(tool, code, 0)
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


@contextlib.contextmanager
def debugged(seen: list[str]) -> Iterator[None]:
    """A breakpoint of pdb in the helper: each stop is told of, and the program goes on."""

    class Debugger(pdb.Pdb):
        def user_line(self, frame: types.FrameType) -> None:
            seen.append(frame.f_code.co_name)
            self.set_continue()

    debugger = Debugger(nosigint=True, readrc=False)
    assert debugger.set_break(double.__code__.co_filename, double.__code__.co_firstlineno + 1) is None
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(None)
        debugger.clear_all_breaks()


TOOLS: list[Callable[[list[str]], contextlib.AbstractContextManager[None]]] = [
    traced, profiled, profiled_natively, debugged
]
if sys.version_info >= (3, 12):
    TOOLS += [
        functools.partial(monitored, tool=tool, codes=codes) for tool in (0, 1) for codes in ((), (double.__code__,))
    ]


@check("hook")
def test_debuggers_profilers_and_coverage_see_the_users_code() -> None:
    for tool in TOOLS:
        with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
            seen: list[str] = []
            assert N.call_eager(outer, 3) == 301, tool
            with tool(seen):
                answer = N.call_eager(outer, 3)
            assert answer == 7 and "double" in seen, tool
            assert N.call_eager(outer, 3) == 301, tool  # compiled again


_GET, _SET = (
    ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc,
    ctypes.pythonapi._PyInterpreterState_SetEvalFrameFunc,
)
_GET.restype = ctypes.pythonapi.PyInterpreterState_Get.restype = ctypes.c_void_p
_SET.restype = None
_GET.argtypes, _SET.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p]
_INTERPRETER = ctypes.pythonapi.PyInterpreterState_Get()
_DEFAULT = ctypes.cast(ctypes.pythonapi._PyEval_EvalFrameDefault, ctypes.c_void_p).value
_JUMP_TO_NEXT = {
    "x86_64": bytes.fromhex("ff25 f2ffffff"),  # jmp [rip - 14]: the eight bytes in front
    "aarch64": struct.pack("<II", 0x58FFFFD0, 0xD61F0200),  # ldr x16, .-8; br x16
}


class Evaluator:
    """Another frame evaluator, in machine code since a Python function would need one itself: hands each frame to `next`.

    chains    it hands on to the evaluator that it found; else to CPython's own
    again     it comes in front once more where it is installed already, as torch.compile does on a second thread
    leaves    how it goes: it puts back what it found ("saved"), CPython's own ("default"), or what it found if it is in front ("if first")
    """

    def __init__(self, chains: bool, again: bool, leaves: str) -> None:
        self.chains, self.again, self.leaves = chains, again, leaves
        self.page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.next = ctypes.c_uint64.from_buffer(self.page)
        code = _JUMP_TO_NEXT[platform.machine()]
        self.page[8 : 8 + len(code)] = code
        self.address = ctypes.addressof(self.next) + 8
        self.installed = False

    def install(self) -> None:
        now = _GET(_INTERPRETER)
        if now != self.address and (self.again or not self.installed):
            self.next.value = now if self.chains else _DEFAULT
            _SET(_INTERPRETER, self.address)
        self.installed = True

    def would_call_itself(self, others: list[Evaluator]) -> bool:
        """Whether `others` alone, without ours, would make a ring of it."""
        nexts = {one.address: one.next.value for one in others}
        at = _GET(_INTERPRETER)
        while at in nexts and at != self.address:
            at = nexts[at]
        return at == self.address

    def remove(self) -> None:
        if self.installed and (self.leaves != "if first" or _GET(_INTERPRETER) == self.address):
            _SET(_INTERPRETER, _DEFAULT if self.leaves == "default" else self.next.value)
        self.installed = False


EVALUATORS = [
    (True, False, "saved"),
    (True, True, "saved"),
    (True, False, "if first"),
    (True, True, "if first"),
    (False, False, "default"),
]


def in_child(body: Callable[[], None]) -> None:
    """Runs `body` in a forked process, which the system ends after two minutes: evaluators that call each other hang with the GIL held."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def step(what: str, evaluators: list[Evaluator], open_regions: list[int]) -> None:
    """One act on this thread: regions of ours ("(" and ")"), evaluators of others ("+0" and "-0"), a frame (".")."""
    if what == "(":
        N.hook_region(True)
        open_regions.append(1)
    elif what == ")" and open_regions:
        N.hook_region(False)
        open_regions.pop()
    elif what[0] in "+-":
        one = evaluators[int(what[1])]
        if what[0] == "-":
            one.remove()
        elif not one.would_call_itself(evaluators):
            one.install()
    answer = outer(3)
    wanted = (301,) if what == "(" else (7, 301) if open_regions else (7,)
    assert answer in wanted and N.call_eager(outer, 3) == 301 and outer(3) in (answer, 301), answer


def finish(evaluators: list[Evaluator]) -> None:
    for one in evaluators:
        one.remove()
    assert outer(3) == 7
    state = N.hook_state()
    assert not state["installed"] and state["regions"] == 0, state
    _SET(_INTERPRETER, _DEFAULT)


@check("hook")
def test_another_evaluator_in_every_order() -> None:
    def body() -> None:
        for kind in EVALUATORS:
            for acts in itertools.product(("(", ")", "+0", "-0"), repeat=5):
                one, regions = Evaluator(*kind), []
                try:
                    for act in acts:
                        step(act, [one], regions)
                    while regions:
                        step(")", [one], regions)
                    finish([one])
                except BaseException as error:
                    raise AssertionError(f"{kind}: {' '.join(acts)}") from error

    if platform.machine() in _JUMP_TO_NEXT:
        with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
            in_child(body)


@check("hook")
def test_two_evaluators_and_two_threads() -> None:
    def body() -> None:
        pools = [ThreadPoolExecutor(1) for _ in range(2)]
        for seed in range(400):
            draw = random.Random(seed)
            evaluators = [Evaluator(*draw.choice(EVALUATORS)) for _ in range(2)]
            regions: list[list[int]] = [[], []]
            acts = [(draw.randrange(2), draw.choice(("(", ")", "+0", "-0", "+1", "-1", "."))) for _ in range(40)]
            try:
                for thread, act in acts:
                    pools[thread].submit(step, act, evaluators, regions[thread]).result()
                for thread in range(2):
                    while regions[thread]:
                        pools[thread].submit(step, ")", evaluators, regions[thread]).result()
                finish(evaluators)
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {acts}") from error

    if platform.machine() in _JUMP_TO_NEXT:
        with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
            in_child(body)


@check("hook")
def test_functions_that_were_not_offered_are_told_of() -> None:
    """Another evaluator comes in the middle of a watched call: nothing is missed if it hands frames on."""

    def interceptor(function, locals):
        if function is None:
            raise LookupError("not offered")
        return ("offered",)

    def body() -> None:
        for chains in (True, False):
            one = Evaluator(chains, False, "default")
            before = N.set_interceptor(interceptor)
            one.install()
            assert N.call_watched(map(double, [1]).__next__) == "offered"
            one.remove()
            N.hook_region(True)  # ours is what it finds
            one.next.value = _GET(_INTERPRETER) if chains else _DEFAULT
            come = functools.partial(_SET, _INTERPRETER, one.address)
            if chains:
                assert N.call_watched(come) is None
            else:
                raises(LookupError, N.call_watched, come)
            _SET(_INTERPRETER, _DEFAULT)
            N.hook_region(False)
            N.set_interceptor(before)

    if platform.machine() in _JUMP_TO_NEXT:
        in_child(body)


@check("hook")
def test_what_the_interpreter_does_by_itself_is_not_offered() -> None:
    """Finalizers of garbage, callbacks of weak references and of the collector, trace functions and audit hooks run in
    the middle of whatever runs."""
    offered: list[str] = []
    ran: list[str] = []

    def interceptor(function, locals):
        offered.append(function.__name__)
        return ("offered",)

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ran.append("finalizer")

    def reference_died(reference: object) -> None:
        ran.append("reference")

    def collector_called(phase: str, info: dict) -> None:
        ran.append("collector")

    def trace(frame: types.FrameType, event: str, argument: object) -> None:
        ran.append("trace")

    def prompt(frame: types.FrameType, event: str, argument: object) -> None:
        """As a debugger's: the program itself runs in a trace function."""
        N.call_watched(map(double, [1]).__next__)

    def audit(event: str, arguments: tuple) -> None:
        ran.append("audit")

    def body() -> None:
        N.set_interceptor(interceptor)
        gc.disable()
        made = [Garbage(), Garbage()]
        reference = weakref.ref(made[1], reference_died)
        del made[:]
        gc.callbacks.append(collector_called)
        N.call_watched(gc.collect)
        gc.callbacks.clear()
        assert reference() is None and {*ran} == {"finalizer", "reference", "collector"} and not offered
        for function, least in ((trace, 1), (prompt, 2)):
            del offered[:]
            sys.settrace(function)
            N.call_watched(map(double, [1]).__next__)
            sys.settrace(None)
            assert {*offered} == {"double"} and len(offered) >= least, offered
        assert "trace" in ran
        del offered[:]
        sys.addaudithook(audit)
        N.call_watched(functools.partial(sys.audit, "an event"))
        assert "audit" in ran and not offered
        del ran[:]
        with Policy({"audit": (None,)}) as policy:
            N.call_eager(functools.partial(sys.audit, "an event"))
            assert "audit" in ran and "audit" not in policy.asked

    in_child(body)
