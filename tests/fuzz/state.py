"""Random programs that read state of many kinds, and streams of calls between which that state changes and changes back.

Takes a seed; gives the text of a program for `session.examine`. What can be read, and how it may change, is in the tables
of `state_kinds.py` (Python and settings) and `state_tensors.py` (tensors, modules, training). Always holds: the same seed
gives the same text; a change may be made twice in a row with one effect, because the worlds of a program share the
process (its settings, PyTorch's classes), and `restore` puts back whatever any program has changed there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import random
import re
import types

from tests.fuzz.state_kinds import KINDS, NUMBERS, PRELUDE, STRINGS, VALUES, Kind
from tests.fuzz.state_tensors import TENSOR_KINDS

ALL = (*KINDS, *TENSOR_KINDS)
MOST = 3  # kinds in a program
BACKENDS = (("eager", 6), ("native", 5), ("aot_eager", 1))
# How a read stands in the program. @ is the expression, $R the variable for the result, $F a helper's name, $A the names
# it takes.
CAUGHT = "try:\n    $R = @\nexcept Exception as error:\n    $R = (type(error).__name__, str(error))"
PLACES = (
    ("", "$R = @"),
    ("", CAUGHT),
    ("def $F($A): return @", "$R = $F($A)"),
    ("def $F($A):\n    fusewright.graph_break()\n    return @", "$R = $F($A)"),
    ("def $F($A): return @", CAUGHT.replace("@", "$F($A)")),
    ("", "fusewright.graph_break()\n$R = @"),
    ("", "$R = @\nfusewright.graph_break()"),
    ("", "$R = (lambda: @)()"),
    ("", "$R = [@ for _ in range(2)]"),
    ("", "$R = list(@ for _ in range(1))"),
    ("", "with torch.no_grad():\n    $R = @"),
    ("", "for _ in range(2):\n    $R = @"),
    ("def $F(*args, **kwargs): return (lambda $A: @)(*args, **kwargs)", "$R = $F($A)"),
)
# How the program comes by its names: head (`$N`: the names, `$B`: the body), what a step does before the call, the call's
# further arguments.
ROUTES = {
    "global": ("def program(x):\n$B", "", ""),
    "argument": ("def program(x, $N):\n$B", "", ", $N"),
    "keyword": ("def program(x, *, $N):\n$B", "", ", $K"),
    "closure": (
        "def make($N):\n    def program(x):\n$C\n    return program\noriginal = program = make($N)",
        "for cell, value in zip(original.__closure__ or (), map(globals().get, original.__code__.co_freevars)): cell.cell_contents = value",
        "",
    ),
    "default": ("def program(x, $K):\n$B\noriginal = program", "original.__defaults__ = ($N,)", ""),
    "container": ("def program(x, box):\n    $N, = box['names']\n$B", "", ", {'names': [$N]}"),
    "attribute": (
        "class Box:\n    def call(self, x):\n        $N, = $S\n$C\nbox = Box()\n$T\nprogram = box.call",
        "$T",
        "",
    ),
    "module": (
        "class Box(torch.nn.Module):\n    def forward(self, x):\n        $N, = $S\n$C\nbox = Box()\n$T\nprogram = box",
        "$T",
        "",
    ),
}
# What the first argument may be.
INPUTS = (
    "made((2, 3), f32, $s)",
    "made((2, 3), f32, $s, grad=True)",
    "made((3, 2), f32, $s).t()",
    "made((2, 6), f32, $s)[:, ::2]",
    "made((1, 3), f32, $s).expand(2, 3)",
    "made((4, 3), f32, $s)[1:3]",
    "made((3, 3), f32, $s)",
    "made((1, 3), f32, $s)",
    "made((2, 3), f64, $s)",
    "made((2, 3), i64, $s)",
    "made((0, 3), f32, $s)",
    "x.detach()",
    "x[:1]",
    "x.clone()",
    "x",
)
SETTINGS = (
    ("", 6),
    ("'dynamic': True", 2),
    ("'dynamic': False", 1),
    ("'options': {'checked': True}", 1),
)


def fill(text: str, number: int, rng: random.Random) -> str:
    """The text with a row's number, and a random value at each place for one."""
    choices = {"V": VALUES, "N": NUMBERS, "S": STRINGS}
    text = text.replace("$E", "w")
    return re.sub(r"\$([VNSI])", lambda found: str(number) if found[1] == "I" else rng.choice(choices[found[1]]), text)


def restore() -> None:
    """Puts back what programs have changed in the process."""
    names, codes = _restoring()
    for code in codes:
        with contextlib.suppress(Exception):  # another program has changed it, or nobody
            exec(code, {**names})


@functools.cache
def _restoring() -> tuple[dict[str, object], list[types.CodeType]]:
    """The names that programs begin with, and what puts back each kind."""
    rng, names = random.Random(0), {"__name__": "restore"}
    exec(compile(PRELUDE, "<restore>", "exec"), names)
    texts = dict.fromkeys(fill(kind.restore, number, rng) for kind in ALL for number in range(MOST) if kind.restore)
    return names, [compile(text, "<restore>", "exec") for text in texts]


def indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def program(seed: int, kinds: tuple[Kind, ...] | None = None, backend: str | None = None) -> str:
    """kinds, backend: else they are drawn."""
    rng = random.Random(seed)
    backend = backend or rng.choices([name for name, _ in BACKENDS], [weight for _, weight in BACKENDS])[0]
    if kinds is None:
        table = rng.choice((ALL, TENSOR_KINDS))
        possible = [kind for kind in table if backend in kind.backends]
        kinds = tuple(rng.sample(possible, rng.choice((1, 1, 2, 2, MOST))))
    setting, weights = zip(*SETTINGS)
    more = rng.choices(setting, weights)[0]
    if "options" in more and backend != "native":
        more = ""
    lines = [f"SETTINGS = {{'backend': '{backend}'{', ' + more if more else ''}}}", "begin(state=True)"]
    helpers, body, names = [], [], []
    changes: list[tuple[int, str]] = []
    for number, kind in enumerate(kinds):
        lines.append(fill(kind.setup, number, rng))
        mine = [fill(name, number, rng) for name in kind.names.split(",") if name]
        names += mine
        changes += [(number, change) for change in kind.changes]
        taken = ", ".join(["x", *mine])
        for text, target in zip(rng.choice(PLACES), (helpers, body)):
            if text:
                text = text.replace("$R", f"r{number}").replace("$F", f"helper{number}").replace("$A", taken)
                target.append(text.replace("@", f"({fill(kind.read, number, rng)})"))
    body.append(f"return x * 2, {', '.join(f'r{number}' for number in range(len(kinds)))}")
    route = rng.choice(list(ROUTES)) if names else "global"
    head, before, after = (_named(part, names, "\n".join(body)) for part in ROUTES[route])
    steady, shared = all(kind.steady for kind in kinds), any(kind.restore for kind in kinds)
    call = f"program(x{after})"
    if random.Random(~seed).random() < 0.15:  # other programs stay what they were for their seeds
        call, steady = f"written({call})", False
    steps = _steps(rng, changes, before, call, (steady, shared))
    return "\n".join([*filter(None, lines), *helpers, head, "x = made((2, 3), f32, 0)", *steps]) + "\n"


def _named(text: str, names: list[str], body: str) -> str:
    filled = {
        "$N": ", ".join(names),
        "$K": ", ".join(f"{name}={name}" for name in names),
        "$S": ", ".join(f"self.{name}" for name in names) + ",",
        "$T": "; ".join(f"box.{name} = {name}" for name in names),
        "$B": indent(body, 4),
        "$C": indent(body, 8),
    }
    return re.sub(r"\$[NKSTBC]", lambda found: filled[found[0]], text)


def _steps(
    rng: random.Random, changes: list[tuple[int, str]], before: str, call: str, are: tuple[bool, bool]
) -> list[str]:
    """The steps; in some of them a change that was made before is made again, so that the state comes back. are: whether
    the program's kinds are steady, and whether some change the process, so that a second change would see the first."""
    steady, shared = are
    made: list[str] = []
    steps: list[str] = []
    grads, keeps, inputs = rng.random() < 0.4, rng.random() < 0.15, rng.random() < 0.3
    for number in range(rng.choice((3, 4, 6, 9))):
        lines = []
        for _ in range(rng.choice((1, 1, 1, 1 if shared else 2)) if number and changes else 0):
            if made and rng.random() < 0.3:
                change = rng.choice(made)
            else:
                place, template = rng.choice(changes)
                change = fill(template, place, rng)
            made.append(change)
            lines.append(f"with contextlib.suppress(Exception):\n{indent(change, 4)}")
        if inputs and rng.random() < 0.3:
            lines.append(f"x = {rng.choice(INPUTS).replace('$s', str(rng.randrange(50)))}")
        ending = [before] if before else []
        if grads and rng.random() < 0.8:
            ending.append(f"result = {call}; backward(result); return result")
        elif keeps:
            ending.append(f"KEPT.append({call}); backward(KEPT.pop(0) if len(KEPT) > 1 else ()); return KEPT")
        else:
            ending.append(f"return {call}")
        steps.append(_step(f"step{number}", [*lines, *ending]))
        if steady and not grads and not keeps and rng.random() < 0.5:
            steps.append(_step(f"step{number}_again", ending))
    return steps


def _step(name: str, lines: list[str]) -> str:
    """A function whose assignments are the world's."""
    text = "\n".join(lines)
    bound = set()
    for node in ast.walk(ast.parse(f"def step():\n{indent(text, 4)}")):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "step":
            bound.add(node.name)
    bound -= {"result"}
    first = [f"global {', '.join(sorted(bound))}"] if bound else []
    return f"def {name}():\n" + indent("\n".join([*first, text]), 4)
