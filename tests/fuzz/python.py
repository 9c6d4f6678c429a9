"""Random Python programs over containers, closures, classes, generators and exceptions, with tensors flowing through,
and streams of calls between which their objects are changed.

Takes a seed; gives the text of a program for `session.examine`. Statements and expressions are drawn from the tables of
the files beside this one; a statement is kept if the program then still runs in eager, now and then also if it raises.
Always holds: the same seed gives the same text; every program ends within MOST lines.
"""

from __future__ import annotations

import random
import re

from fusewright.base.records import dataclass, field
from tests.fuzz.python_classes import BETWEEN, CLASS_HEADS, HELPERS, MEMBERS
from tests.fuzz.python_expressions import EXPRESSIONS, LITERALS
from tests.fuzz.python_forms import FORMS
from tests.fuzz.python_statements import STATEMENTS
from tests.fuzz.session import errors_of

# $x: an expression of the kind x; $X: a name that is bound to that kind; $x@e: one in which e is an int as well (@e:t:
# a tensor); $B: a block of statements; $0 .. $9: names of this row's own.
HOLE = re.compile(r"\$([a-zA-Z0-9])((?:@\w+(?::[a-z])?)*)")
EXTRA = re.compile(r"@(\w+)(?::([a-z]))?")
KINDS = "ibstldeuqofg"
DEEPEST, DEEPEST_BLOCK = 3, 2
HEAD_VALUES = (
    "L0, D0 = [3, 1, 2], {'a': 1, 'b': 2}",
    "E0, Q0 = {1, 2}, collections.deque([1, 2, 3], 4)",
    "T0 = made((2, 3), f32, 1)",
)
SETTINGS = (
    ("{'backend': 'eager'}", 6),
    ("{}", 3),
    ("{'dynamic': True}", 2),
    ("{'backend': 'eager', 'dynamic': True}", 2),
    ("{'backend': 'eager', 'dynamic': False}", 1),
)


@dataclass(slots=True)
class Scope:
    """Names that can be read, with their kinds; those of `own` can be bound without more ado."""

    names: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def within(self, extra: str, function: bool) -> Scope:
        more = {name: kind or "i" for name, kind in EXTRA.findall(extra)}
        return Scope({**self.names, **more}, set() if function else set(self.own))


@dataclass(slots=True)
class Writer:
    rng: random.Random
    count: int = 0
    in_loop: int = 0

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def expression(self, kind: str, scope: Scope, depth: int = 0) -> str:
        if kind == "x":
            kind = self.rng.choice("iiiissttttllldddeuuqoofgb")
        if kind in LITERALS and kind not in EXPRESSIONS:
            return self.rng.choice(LITERALS[kind])
        names = [name for name, held in scope.names.items() if held == kind]
        chance = self.rng.random()
        if names and (chance < 0.55 or depth >= DEEPEST):
            return self.rng.choice(names[-6:])
        if depth >= DEEPEST or chance > 0.9:
            return self.rng.choice(LITERALS[kind])
        return self.fill(self.rng.choice(EXPRESSIONS[kind]), scope, depth + 1, {})

    def fill(self, row: str, scope: Scope, depth: int, bound: dict[str, str]) -> str:
        own: dict[str, str] = {}

        def hole(found: re.Match[str]) -> str:
            key, extra = found.groups()
            if key.isdigit():
                return own.setdefault(key, self.fresh("n"))
            if key.isupper():
                names = [name for name in scope.own if scope.names.get(name) == key.lower()]
                name = self.rng.choice(sorted(names)) if names and self.rng.random() < 0.4 else self.fresh(key.lower())
                bound[name] = key.lower()
                return name
            text = self.expression(key, scope.within(extra, False) if extra else scope, depth)
            follows = found.string[found.end() : found.end() + 1]
            return f"({text})" if follows in (".", "[", "(") and not text.isidentifier() else text

        return HOLE.sub(hole, row)

    def statement(self, scope: Scope, depth: int) -> list[str]:
        """Lines of one statement; the names that it binds are in the scope afterwards."""
        groups = [group for group in (*STATEMENTS, *FORMS) if depth < DEEPEST_BLOCK or not group.blocks]
        group = self.rng.choices(groups, [group.weight for group in groups])[0]
        row = self.rng.choice(group.rows)
        if not self.in_loop and re.search(r"\b(break|continue)\b", row) and "for " not in row and "while " not in row:
            return self.statement(scope, depth)
        return self.rows(row, scope, depth)

    def rows(self, row: str, scope: Scope, depth: int) -> list[str]:
        """The lines of a row that may hold blocks."""
        lines: list[str] = []
        bound: dict[str, str] = {}
        own = {key: self.fresh("n") for key in sorted(set(re.findall(r"\$(\d)", row)))}
        row = re.sub(r"\$(\d)", lambda found: own[found[1]], row)
        inner, functions = scope, [0]
        for line in row.split("\n"):
            indent = len(line) - len(line.lstrip())
            while len(functions) > 1 and indent <= functions[-1]:
                functions.pop()
            function = len(functions) > 1
            if block := re.fullmatch(r"\s*\$([BY])((?:@\w+(?::[a-z])?)*)", line):
                inner = scope.within(block[2], function)
                inner.names.update(bound)
                for _ in range(self.rng.choice((1, 1, 2, 3))):
                    lines += [" " * indent + one for one in self.statement(inner, depth + 1)]
                    if block[1] == "Y" and self.rng.random() < 0.7:
                        text = self.fill(self.rng.choice(("yield $x", "$X = yield $i", "yield $i")), inner, 2, inner.names)
                        lines.append(" " * indent + text)
                continue
            new: dict[str, str] = {}
            here = inner if function else scope
            lines.append(self.fill(line, Scope({**here.names, **bound}, here.own), min(depth + 1, 2), new))
            if function:
                inner = Scope({**here.names, **new}, here.own)
            else:
                bound.update(new)
            if re.match(r"\s*(def|class) ", line):
                functions.append(indent)
            if line.strip().startswith(("for ", "while ")):
                self.in_loop += 1
        self.in_loop -= sum(line.strip().startswith(("for ", "while ")) for line in row.split("\n"))
        for name, kind in bound.items():
            scope.names[name] = kind
            scope.own.add(name)
        for name, kind in own.items():
            if re.search(rf"^def {kind}\(", row, re.MULTILINE):
                scope.names[kind] = "f"
        return lines


def program(seed: int) -> str:
    rng = random.Random(seed)
    writer = Writer(rng)
    scope = Scope({"D0": "d", "L0": "l", "T0": "t", "E0": "e", "Q0": "q", "GN": "i"})
    head = [
        f"SETTINGS = {rng.choices([text for text, _ in SETTINGS], [weight for _, weight in SETTINGS])[0]}",
        "begin()",
        "LOG, KEPT, COUNT, GN = [], [], [0], 3",
        *HEAD_VALUES,
    ]
    classes: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        classes += _class(writer, scope)
    for row in rng.sample(HELPERS, rng.choice((0, 1, 1, 2))):
        classes += writer.rows(row, scope, 1)
    steps = _steps(writer, scope)
    inner = Scope({**scope.names, "a": "t", "b": "i", "rest": "u", "k": "i", "more": "d"}, {"b", "k"})
    signature = rng.choice(("a, b=2", "a, b=2, *rest", "a, b=2, *, k=3", "a, /, b=2, *rest, k=3, **more", "a, b=2, **more"))
    for name in ("rest", "k", "more"):
        if name not in signature:
            inner.names.pop(name)
            inner.own.discard(name)
    top = ["global GN"] if rng.random() < 0.3 else []
    if top:
        inner.own.add("GN")

    def text(body: list[str]) -> str:
        lines = [*head, *classes, f"def program({signature}):", *("    " + line for line in top + body)]
        for number, step in enumerate(steps):
            lines += [f"def step{number}():", *("    " + line for line in step)]
        return "\n".join(lines) + "\n"

    body: list[str] = []
    end = "return a"
    failing = errors_of(text([end]))
    if failing is None:
        return program(seed + 1_000_003)
    for _ in range(rng.randrange(2, 9)):
        before = dict(inner.names), set(inner.own)
        lines = writer.statement(inner, 0)
        now = errors_of(text([*body, *lines, end]))
        if now is None or (now > failing and rng.random() > 0.1):
            inner.names, inner.own = before
            continue
        failing = now
        body += lines
    for _ in range(6):
        results = ", ".join(writer.expression("x", inner) for _ in range(rng.choice((1, 2, 3))))
        if (now := errors_of(text([*body, f"return {results}"]))) is not None and now <= failing:
            end = f"return {results}"
            break
    return text([*body, end])


def _class(writer: Writer, scope: Scope) -> list[str]:
    rng = writer.rng
    name = f"C{writer.fresh('')}"
    known = [held for held, kind in scope.names.items() if kind == "c"]
    head = rng.choice(CLASS_HEADS) if not known or rng.random() < 0.6 else f"class $N({rng.choice(known)}):"
    *decorators, head = head.replace("$N", name).split("\n")
    lines = [*decorators, head]
    for row in rng.sample(MEMBERS, rng.randrange(2, 7)):
        inner = Scope({**scope.names, "self": "o"})
        lines += ["    " + line for line in writer.rows(row, inner, 1)]
    lines += ["    def __repr__(self):", f"        return '{name}'"]
    if errors_of("\n".join(["begin()", "LOG, KEPT, COUNT, GN = [], [], [0], 3", *HEAD_VALUES, *lines, f"{name}(1)", "def step0(): pass"])) is None:
        return []
    made = f"O{writer.fresh('')}"
    scope.names[name], scope.names[made] = "c", "o"
    return [*lines, f"{made} = {name}(1)"]


def _steps(writer: Writer, scope: Scope) -> list[list[str]]:
    rng, steps = writer.rng, []
    shape, dtype, grad = rng.choice(("(2, 3)", "(3,)", "(1, 3)", "()")), rng.choice(("f32", "f32", "f64", "i64")), ""
    if dtype != "i64" and rng.random() < 0.25:
        grad = ", grad=True"
    call = rng.choice(("x", "x, 1", "x, b=4", "a=x", "x, -1", "x, GN", "x, L0[0]"))
    for number in range(rng.choice((2, 3, 3, 4))):
        lines = ["global GN"]
        for _ in range(rng.choice((0, 1, 2)) if number else 0):
            lines.append(writer.fill(rng.choice(BETWEEN), Scope(dict(scope.names)), 2, {}))
        if rng.random() < 0.15:
            shape = rng.choice(("(2, 3)", "(4, 3)", "(3,)"))
        lines.append(f"x = made({shape}, {dtype}, {rng.randrange(50)}{grad})")
        if rng.random() < 0.2:
            call = rng.choice(("x", "x, 1", "x, b=4", "x, 0", "x, b=-2", "x, 1.5", "x, True"))
        ending = rng.choice(("r = $; KEPT.append(r); return r", "return $", "return $, [poke(kept) for kept in KEPT]"))
        lines.append(ending.replace("$", f"program({call})"))
        steps.append(lines)
    return steps
