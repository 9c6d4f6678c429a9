"""The sizes of a capture: what the declared ones are in terms of its symbols, and the facts that a call must hold.

Takes the `Request` of an export and what was captured; gives `Symbols`. Always holds: a declared size that the program
does not leave free is an ExportError that names the dimension, what the program needs, and the user's line.
"""

from __future__ import annotations

from typing import Any

from fusewright.base.errors import ExportError
from fusewright.base.location import Location, users_line
from fusewright.base.records import dataclass, field
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards.sources import TensorSize
from fusewright.exporting.dims import Dim
from fusewright.exporting.request import Request
from fusewright.sizes.expressions import Expr, Relation, Symbol, free_symbols, substitute, symbol
from fusewright.sizes.shape_env import ShapeEnv


@dataclass(slots=True)
class Captured:
    """A capture: its frame, functional graph and sizes; the leaf of each stand-in tensor by id."""

    frame: CapturedFrame
    graph: Any
    env: ShapeEnv | None
    stand_ins: list[Any]
    positions: dict[int, int]


@dataclass(slots=True)
class Symbols:
    """The symbols of a capture by (leaf, dimension); what the declared ones equal in terms of roots; the facts that a
    call must hold."""

    at: dict[tuple[int, int], Symbol] = field(default_factory=dict)
    equal: dict[Expr, Any] = field(default_factory=dict)
    facts: list[tuple[Relation, str]] = field(default_factory=list)
    ranges: dict[Symbol, tuple[int, int | None]] = field(default_factory=dict)
    ones: set[Expr] = field(default_factory=set)  # the program has asked whether these are 1
    labels: dict[Symbol, str] = field(default_factory=dict)
    where: dict[Symbol, str] = field(default_factory=dict)

    def of_roots(self, fact: Relation) -> tuple[Relation, bool]:
        """A fact as one about the roots, and whether it follows from their ranges."""
        ranged: dict[Expr, Any] = {one: symbol(f"{one}_r", *bounds) for one, bounds in self.ranges.items()}
        said = Relation(fact.op, substitute(fact.left, self.equal), substitute(fact.right, self.equal))
        within = Relation(fact.op, substitute(said.left, ranged), substitute(said.right, ranged))
        return said, ShapeEnv().known(within) is True


def line_of(stack: tuple[Location, ...]) -> str:
    return str(users_line(stack) or "an operator of the program")


def symbols_of(request: Request, captured: Captured) -> Symbols:
    """Raises ExportError for a declared size that the program does not leave free."""
    made, env = located(request, captured), captured.env
    if env is None:
        return made
    # Every asked fact is said of the roots: it follows from their ranges, or it is a constraint.
    nothing = ShapeEnv()
    for asked, stack in zip(env.guards, env.asked_at, strict=True):
        fact, follows = made.of_roots(asked)
        if follows:
            continue
        names = {one for side in (fact.left, fact.right) for one in free_symbols(side)}
        named = [one for one in names if one in made.labels and "." not in made.labels[one]]
        where = line_of(stack)
        larger: dict[Expr, Any] = {
            one: symbol(f"{one}_r", max(2, low), high) for one, (low, high) in made.ranges.items()
        }
        if nothing.known(Relation(fact.op, substitute(fact.left, larger), substitute(fact.right, larger))):
            made.ones |= names
            continue
        fixes = fact.op == "==" and len(names) == 1
        if named or (fixes and any(_is_dynamic(request, made, one) for one in names)):
            raise ExportError(_narrowed(request, made, fact, where))
        made.facts.append((fact, where))
    return made


def located(request: Request, captured: Captured) -> Symbols:
    """The symbols of a capture, without facts."""
    made, env = Symbols(), captured.env
    if env is None:
        return made
    leaf_of = {
        source: captured.positions[id(real)]
        for source, real in zip(captured.frame.inputs, captured.frame.example_inputs, strict=True)
        if id(real) in captured.positions
    }
    for one, known in env.symbols.items():
        if not isinstance(known.source, TensorSize) or known.source.base not in leaf_of:
            raise ExportError(f"the program depends on {one}, which is no size of a tensor of the arguments")
        made.at[leaf_of[known.source.base], known.source.dim] = one
    roots: dict[str, Symbol] = {}
    for place, one in made.at.items():
        size = request.dims[place]
        if isinstance(size, Dim) and (size.scale, size.offset) == (1, 0):
            roots.setdefault(size.name, one)
    for (leaf, dim), one in made.at.items():
        size = request.dims[leaf, dim]
        if isinstance(size, Dim):
            root = roots.get(size.name)
            if root is None:  # the tensors that have the named size itself are not read
                root = roots[size.name] = unread_root(request, made, size)
            if root is not one:
                made.equal[one] = root * size.scale + size.offset
                continue
            made.labels[one], made.where[one] = size.name, f"Dim at {size.where}"
            made.ranges[one] = (size.min, size.max)
        else:
            made.labels[one], made.where[one] = f"{request.names[leaf]}.size({dim})", "Dim.AUTO"
            made.ranges[one] = (1, None)
    return made


def unread_root(request: Request, made: Symbols, size: Dim) -> Symbol:
    leaf, dim = next(
        place
        for place, one in request.dims.items()
        if isinstance(one, Dim) and one.name == size.name and (one.scale, one.offset) == (1, 0)
    )
    root = symbol(f"r{len(made.at)}_{size.name}", size.min, size.max)
    made.labels[root], made.where[root] = size.name, f"Dim at {size.where}"
    made.ranges[root] = (size.min, size.max)
    made.at = {**made.at, (leaf, dim): root}
    return root


def _is_dynamic(request: Request, made: Symbols, one: Expr) -> bool:
    return any(found is one and request.dims[place] is Dim.DYNAMIC for place, found in made.at.items())


def _narrowed(request: Request, made: Symbols, fact: Relation, where: str) -> str:
    text = str(fact)
    for one, label in sorted(made.labels.items(), key=lambda pair: -len(str(pair[0]))):
        text = text.replace(str(one), label)
    involved = free_symbols(fact.left) | free_symbols(fact.right)
    places = [
        f"{made.labels[found]} (dimension {dim} of {request.names[leaf]}, {made.where[found]})"
        for (leaf, dim), found in made.at.items()
        if found in involved and found in made.labels
    ]
    return (
        f"the program does not hold for every size that was declared of {', '.join(places)}: it needs {text}, asked at "
        f"{where}. Change the line, narrow the range, or use Dim.AUTO."
    )
