"""Random programs that read many kinds of state, run eagerly and compiled while the state changes between calls.

Takes a seed; gives what differed between the two, as text, or None. A program lives in two copies of its world (two namespaces with equal content): one
is run eagerly, the other compiled. After every change both must give the same result or exception, and be left in the same state.
"""

from __future__ import annotations

import random
import re
import struct
import sys
import types
import warnings
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import fusewright
from fusewright.base.events import STREAM, Captured, Recompiling, Skipped
from tests.capture.guards.mutable_state import KINDS, NUMBERS, PRELUDE, STRINGS, VALUES, Kind

# How a read stands in the program. @ is the expression, $R the variable for the result, $F a helper's name, $A the names it takes.
PLACES = {
    "plain": ("", "$R = @"),
    "caught": ("", "try:\n    $R = @\nexcept Exception as error:\n    $R = (type(error).__name__, str(error))"),
    "helper": ("def $F($A): return @", "$R = $F($A)"),
    "helper that breaks": ("def $F($A):\n    fusewright.graph_break()\n    return @", "$R = $F($A)"),
    "caught helper": ("def $F($A): return @", "try:\n    $R = $F($A)\nexcept Exception as error:\n    $R = (type(error).__name__, str(error))"),
    "after a break": ("", "fusewright.graph_break()\n$R = @"),
    "before a break": ("", "$R = @\nfusewright.graph_break()"),
    "lambda": ("", "$R = (lambda: @)()"),
    "comprehension": ("", "$R = [@ for _ in range(2)]"),
    "generator": ("", "$R = list(@ for _ in range(1))"),
    "without gradients": ("", "with torch.no_grad():\n    $R = @"),
    "loop": ("", "for _ in range(2):\n    $R = @"),
    "keyword helper": ("def $F(*args, **kwargs): return (lambda $A: @)(*args, **kwargs)", "$R = $F($A)"),
}  # fmt: skip
ROUTES = ("global", "argument", "keyword", "closure", "default", "container")


class AddOne(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if isinstance(result, torch.Tensor) and func is torch.Tensor.add else result


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.add.Tensor else result


_inference: list[object] = []


def leave_modes() -> None:
    _inference.clear()
    while torch._C._len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()


def enter_inference() -> None:
    if not _inference:
        _inference.append(torch._C._InferenceMode(True))


SHARED = {
    "leave_modes": leave_modes,
    "enter_inference": enter_inference,
    "AddOne": AddOne,
    "Doubling": Doubling,
    "real_round": round,
}


def describe(value: object, depth: int = 0) -> str:
    """Everything about a value that a program could tell, as text, identity apart."""
    if depth > 6:
        return "…"
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                content = (
                    ""
                    if value.is_meta
                    else [
                        f"{one:.4g}"
                        for one in value.detach()
                        .clone()
                        .resolve_conj()
                        .to_dense()
                        .flatten()
                        .to(torch.complex128)
                        .tolist()
                    ]
                )
        except Exception as error:
            content = repr(error)
        layout = "" if value.layout != torch.strided else tuple(value.stride())
        return f"{kind}({value.dtype}, {tuple(value.shape)}, {layout}, {value.device}, {value.requires_grad}, {value.grad_fn is not None}, {content})"
    if isinstance(value, float):
        return f"{kind}:{struct.pack('d', value).hex()}"
    if isinstance(value, complex):
        return f"{kind}:{describe(value.real)}{describe(value.imag)}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{kind}:{value.dtype}:{value.tolist()!r}"
    if isinstance(value, dict):
        return f"{kind}{{{', '.join(f'{describe(k, depth + 1)}: {describe(v, depth + 1)}' for k, v in dict.items(value))}}}"
    if isinstance(value, list | tuple | deque | set | frozenset):
        iterate = next(base.__iter__ for base in (list, tuple, deque, set, frozenset) if isinstance(value, base))
        return f"{kind}[{', '.join(describe(element, depth + 1) for element in iterate(value))}]"
    if isinstance(value, slice):
        return f"slice({describe(value.start)}, {describe(value.stop)}, {describe(value.step)})"
    if isinstance(value, int | str | bytes | bytearray | range | type(None) | torch.dtype | torch.device):
        base = next((base for base in (int, str, bytes) if isinstance(value, base)), None)
        return f"{kind}:{base.__repr__(value) if base else repr(value)}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{kind}:{value.__name__}"
    if isinstance(value, torch.nn.Module):
        return f"{kind}({describe(dict(value.__dict__), depth + 1)})"
    attributes = getattr(value, "__dict__", None) if type(value).__module__ in ("world", "types") else None
    return f"{kind}({describe(attributes, depth + 1)})" if isinstance(attributes, dict) else kind


@dataclass
class Program:
    """The text of a program, and what may happen to it."""

    kinds: list[Kind]
    setup: str
    text: str
    names: list[str]
    route: str
    changes: list[list[str]] = field(default_factory=list)
    restore: str = ""

    def steady(self) -> bool:
        return all(kind.steady for kind in self.kinds)


def fill(text: str, number: int, rng: random.Random) -> str:
    choices = {"V": VALUES, "N": NUMBERS, "S": STRINGS}
    return re.sub(r"\$([VNSI])", lambda match: str(number) if match[1] == "I" else rng.choice(choices[match[1]]), text)


def indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def generate(rng: random.Random, backend: str, kinds: list[Kind] | None = None) -> Program:
    possible = [kind for kind in KINDS if backend in kind.backends]
    chosen = kinds if kinds is not None else rng.sample(possible, rng.choice((1, 1, 2, 2, 3, 4)))
    setup, helpers, body, names, changes, restore = [], [], [], [], [], []
    for number, kind in enumerate(chosen):
        setup.append(fill(kind.setup, number, rng))
        mine = [fill(name, number, rng) for name in kind.names.split(",") if name]
        names += mine
        changes.append([(number, change) for change in kind.changes])
        restore.append(fill(kind.restore, number, rng))
        helper, line = PLACES[rng.choice(list(PLACES))]
        read = "(" + fill(kind.read, number, rng) + ")"
        for text, target in ((helper, helpers), (line, body)):
            if text:
                text = (
                    text.replace("$R", f"r{number}")
                    .replace("$F", f"helper{number}")
                    .replace("$A", ", ".join(["x", *mine]))
                )
                target.append(text.replace("@", read))
    route = rng.choice(ROUTES)
    results = ", ".join(f"r{number}" for number in range(len(chosen)))
    lines = [*body, f"return x * 2, {results}"]
    inner = "\n".join(lines)
    given = ", ".join(names)
    if route == "argument":
        text = f"def program({', '.join(['x', *names])}):\n{indent(inner, 4)}"
    elif route == "keyword":
        text = f"def program(x{', *, ' + given if names else ''}):\n{indent(inner, 4)}"
    elif route == "default":
        text = f"def program({', '.join(['x', *(f'{name}={name}' for name in names)])}):\n{indent(inner, 4)}"
    elif route == "closure":
        text = (
            f"def make({given}):\n    def program(x):\n{indent(inner, 8)}\n    return program\nprogram = make({given})"
        )
    elif route == "container":
        unpack = f"{given}{',' if names else ''} = box['names']\n" if names else ""
        text = f"def program(x, box):\n{indent(unpack + inner, 4)}"
    else:
        text = f"def program(x):\n{indent(inner, 4)}"
    return Program(
        chosen,
        "\n".join(line for line in setup if line),
        "\n".join([*helpers, text]),
        names,
        route,
        changes,
        "\n".join(line for line in restore if line),
    )


sys.modules.setdefault("world", types.ModuleType("world"))  # dataclasses look up the module of a class


class Copy:
    """One copy of a program's world."""

    def __init__(self, program: Program, label: str) -> None:
        self.program = program
        self.label = label
        self.names: dict[str, object] = {"__name__": "world", **SHARED}
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        for text in (PRELUDE, program.setup, program.text):
            failed = self.run(text)
            assert not failed, f"{failed} in\n{text}"

    def run(self, text: str) -> str:
        """Executes a statement; gives the exception as text."""
        try:
            exec(compile(text.replace("$E", self.label), "<world>", "exec"), self.names)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def call(self, function) -> str:
        program, names = self.program, self.names
        values = [names.get(name) for name in program.names]
        x = torch.arange(1.0, 7.0, dtype=torch.float32, device="cpu").view(2, 3)
        original = names["program"]
        if program.route == "default":
            original.__defaults__ = tuple(values)
        elif program.route == "closure":
            for name, cell in zip(original.__code__.co_freevars, original.__closure__ or ()):
                cell.cell_contents = names[name]
        args = values if program.route == "argument" else [{"names": values}] if program.route == "container" else []
        kwargs = dict(zip(program.names, values)) if program.route == "keyword" else {}
        try:
            result = function(x, *args, **kwargs)
        except Exception as error:
            return "raises " + re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}").replace(
                f"stale_{self.label}_", "stale_"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return describe(result).replace(f"stale_{self.label}_", "stale_")

    def state(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            text = self.text_of_names()
        return re.sub(r"int:1[34]\d{13}\b", "id", text).replace(f"stale_{self.label}_", "stale_")

    def text_of_names(self) -> str:
        return describe({name: self.names.get(name) for name in self.program.names}) + self.globals_state()

    def globals_state(self) -> str:
        return describe({name: value for name, value in self.names.items() if re.fullmatch(r"g\d+", name)})


def random_state() -> tuple[object, ...]:
    return torch.random.get_rng_state(), random.getstate(), np.random.get_state()


def fingerprint(state) -> str:
    return f"random state {hash((state[0].numpy().tobytes(), state[1], state[2][1].tobytes(), *state[2][2:]))}"


def set_random_state(state) -> None:
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@dataclass
class Outcome:
    difference: str | None = None
    captures: int = 0
    skips: int = 0
    needless: str | None = None
    calls: int = 0


def run_case(seed: int, backend: str = "eager", kinds: list[Kind] | None = None, steps: int = 4, **settings) -> Outcome:
    """Builds one program and changes its state `steps` times."""
    rng = random.Random(seed)
    program = generate(rng, backend, kinds)
    outcome = Outcome()
    events: list[object] = []
    try:
        eager, compiled = Copy(program, "e"), Copy(program, "c")
        function = fusewright.compile(compiled.names["program"], backend=backend, recompile_limit=64, **settings)
        done: list[str] = []
        with STREAM.listening(events.append), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warnings.filterwarnings("error", category=fusewright.base.errors.InternalErrorWarning)
            for step in range(steps + 1):
                change = ""
                if step:
                    possible = [one for row in program.changes for one in row]
                    if possible:
                        number, template = rng.choice(possible)
                        change = fill(template, number, rng)
                for repeat in range(2):
                    statement = change if repeat == 0 else ""
                    done.append(statement)
                    before = random_state()
                    RemovableHandle.next_id = 10 * step
                    failed = eager.run(statement)
                    expected = eager.call(eager.names["program"])
                    after = random_state()
                    set_random_state(before)
                    RemovableHandle.next_id = 10 * step
                    failed_too = compiled.run(statement)
                    captured_before = sum(isinstance(event, Captured) for event in events)
                    actual = compiled.call(function)
                    captured = sum(isinstance(event, Captured) for event in events) - captured_before
                    outcome.calls += 1
                    left, right = (
                        f"{failed}{expected}".replace("stale_e_", "stale_"),
                        f"{failed_too}{actual}".replace("stale_c_", "stale_"),
                    )
                    if left == right:
                        left, right = eager.state(), compiled.state()
                    if left == right:
                        left, right = fingerprint(after), fingerprint(random_state())
                    if left != right:
                        where = next(
                            (i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right))
                        )
                        outcome.difference = (
                            f"seed {seed} backend {backend} route {program.route} kinds {[kind.name for kind in program.kinds]}\n{program.setup}\n{program.text}\n"
                            f"changes: {done}\neager:    {left[max(0, where - 150) : where + 150]}\ncompiled: {right[max(0, where - 150) : where + 150]}"
                        )
                        return outcome
                    if repeat and captured and program.steady():
                        outcome.needless = f"seed {seed} kinds {[kind.name for kind in program.kinds]} route {program.route} after {done}: {captured} captures on an equal call: {[event.failures for event in events if isinstance(event, Recompiling)][-1:]}\n{program.setup}\n{program.text}"
        outcome.captures = sum(isinstance(event, Captured) for event in events)
        outcome.skips = sum(isinstance(event, Skipped) for event in events)
        return outcome
    finally:
        if program.restore:
            Copy.run(eager, program.restore)
        leave_modes()
        fusewright.reset()
