"""Settings of one capture: what the driver decides and the interpreter and `World` read; and what captures remember.

Always holds: the settings are plain data, made once per compiled function by the driver, and capture never changes
them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.base.signals import Deadline, GraphBreak
from fusewright.capture.bytecode.resume import Resumptions


def _unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    return function


def call_plainly(function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """Calls `function`; stands in for the native `call_eager`, which does the same with the frame hook installed."""
    return function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """fullgraph          a graph break is re-raised to the driver instead of being cut
    level                 "aten" for the native stages, "torch" for backends that take a torch-level graph
    dynamic               None: sizes are static until they change; True: symbolic from the start; False: never symbolic
    instruction_budget    work, in interpreted instructions, after which the frame is run eagerly
    deadline              when capture and compile must be done; after that the frame is run eagerly
    inline_depth          interpreted frames on top of each other after which a call is a graph break
    max_attempts          captures of one frame (the first, and one for the break that it found) before giving up
    wrap_resume           makes a resume function a compiled function
    resumptions           the resume functions that there are
    call_eager            call_eager(fn, *args, **kwargs): calls with the frame hook installed, so that callees are
        compiled
    call_paused           call_paused(fn, *args, **kwargs): calls without compiling the frames that it runs
    differentiate   differentiate(recorder, outputs): records the gradients of the graph's outputs, see
                    autograd/record.py; None: the backend runs operators that autograd follows by itself, or has no
                    backward
    own_random      dropout draws from the kernels' own generator (record/draws.py), not from PyTorch's
    follows_autograd  whether the backend's outputs carry autograd's history by themselves
    data_shapes     operators whose result has a size that depends on data are recorded, see record/data_sizes.py; else
        they break the graph
    data_numbers    an integer that is read from a tensor (item()) is recorded as such a size
    speculates      values that the program reads from tensors are taken for granted (capture/interpret/speculation.py)
    ones            sizes of 1 that would be symbolic were they larger are so, as if they were
        (capture/border/dynamic.py)
    exporting       the program is captured whole, to run elsewhere: is_exporting() answers True
    other_level     the settings for a frame with something that has no form at this level: at torch level, a transform
        or a custom gradient; at ATen level, gradients through sizes that depend on data. None: that breaks the graph
    bucket          dimensions by name ("batch", "seq", "ARGUMENT.DIMENSION") with the sizes that theirs may be padded
        to
    """

    fullgraph: bool = False
    level: Literal["aten", "torch"] = "aten"
    dynamic: bool | None = None
    instruction_budget: int = 5_000_000
    deadline: Deadline = field(default_factory=functools.partial(Deadline, 0))
    inline_depth: int = 400
    max_attempts: int = 4
    wrap_resume: Callable[[Callable[..., object]], Callable[..., object]] = _unwrapped
    resumptions: Resumptions = field(default_factory=Resumptions)
    call_eager: Callable[..., object] = call_plainly
    call_paused: Callable[..., object] = call_plainly
    differentiate: Callable[..., Any] | None = None
    follows_autograd: bool = True
    own_random: bool = False
    data_shapes: bool = False
    data_numbers: bool = False
    speculates: bool = False
    ones: bool = False
    exporting: bool = False
    other_level: CaptureOptions | None = None
    bucket: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class History(dict[object, tuple[int | None, ...]]):
    """What the captures of one compiler have met, and add to: sizes and numbers by (code, source), None where they
    differed, and what is known of a function as a whole (capture/border/dynamic.py).

    breaks  by code, where functions break that the last frame with a break had called: what is left of that frame calls
            them next, each as a frame of its own, and they are not interpreted down to the same place again; kept until
            another frame is captured
    imports the first imports for which a call ran eagerly
    """

    def __init__(self) -> None:
        super().__init__()
        self.imports: set[object] = set()
        self.breaks: dict[types.CodeType, KnownBreak] = {}

    def known_break(self, code: types.CodeType) -> KnownBreak | None:
        """What is known of the break of a frame that is about to be captured."""
        found = self.breaks.get(code)
        if found is None:
            self.breaks = {}
        return found

    def tries(self, first_import: object) -> bool:
        """Whether a call is run eagerly so that the next one finds it done: once, since it may fail."""
        known = first_import in self.imports
        self.imports.add(first_import)
        return not known

    def note_breaks(self, signal: GraphBreak) -> None:
        """Notes a break that depends on data alone. Of a frame that began after an operator nothing is known: it would
        begin with what that has given."""
        self.breaks = {}
        for level, ((called, _, operators), (code, pc, begun)) in enumerate(itertools.pairwise(signal.passed), 1):
            if not begun and not code.co_flags & inspect.CO_GENERATOR:
                self.breaks[code] = KnownBreak(pc, called, operators, signal.stack[-level:], signal)


@dataclass(frozen=True, slots=True)
class KnownBreak:
    """A break below a call: the one of the code `called` in front of the instruction at `pc`, with `operators` recorded
    until then. `below`: the user's stack below the function."""

    pc: int
    called: types.CodeType
    operators: int
    below: tuple[Location, ...]
    signal: GraphBreak

    def again(self, stack: tuple[Location, ...]) -> GraphBreak:
        """The break, met by a frame of the function itself."""
        signal = GraphBreak(self.signal.code, self.signal.detail)
        signal.stack, signal.operators = (*stack, *self.below), self.signal.operators
        return signal
