"""Where an expression is evaluated: the chain of scopes around it, and which of them is the outermost that knows
everything it needs.

Takes scopes; gives `Context`s. Always holds: a chain runs from the function's entry inwards, each scope dominated by
those before it; scopes marked `lane` belong to one vector (`lanes` elements of axis `vector`, the first at the axis'
value in the chain plus `offset`).
"""

from __future__ import annotations

from fusewright.codegen.analysis import Facts
from fusewright.codegen.llvm.emit.builder import Scope, Value
from fusewright.sizes.expressions import Expr


class Context:
    """A point of the program: `chain` of scopes, and the vector (if any) that is being computed."""

    __slots__ = ("_levels", "_uniform", "barrier", "chain", "lanes", "offset", "vector")

    def __init__(self, chain: tuple[Scope, ...], lanes: int = 1, vector: Expr | None = None, offset: int = 0) -> None:
        self.chain = chain
        self.lanes = lanes
        self.vector = vector
        self.offset = offset
        self.barrier = max((i for i, scope in enumerate(chain) if scope.barrier), default=0)
        self._levels: dict[object, int] = {}
        self._uniform: Context | None = None

    @property
    def here(self) -> Scope:
        return self.chain[-1]

    @property
    def uniform(self) -> Context:
        """The same point without the lanes: where the vector axis is the scalar index of the vector's loop."""
        if self._uniform is None:
            plain = tuple(scope for scope in self.chain if not scope.lane)
            self._uniform = self if len(plain) == len(self.chain) else Context(plain)
        return self._uniform

    def level(self, dep: object) -> int:
        """The position in the chain of the scope that defines `dep`; 0 (the entry) for what no loop defines."""
        found = self._levels.get(dep)
        if found is None:
            in_lanes = dep is self.vector
            for i, scope in enumerate(self.chain):
                if dep in scope.defines and (scope.lane or not in_lanes):
                    found = self._levels[dep] = i
                    break
            else:
                found = 0
        return found

    def home(self, facts: Facts) -> int:
        """The outermost level at which a value with these facts can be computed."""
        level, varying = 0, False
        for dep in facts.deps:
            at = self.level(dep)
            varying = varying or self.chain[at].lane
            level = max(level, at)
        if facts.effects:
            level = max(level, self.barrier)
        if facts.volatile:
            level = len(self.chain) - 1
        if varying and not self.chain[level].lane:
            level += 1
        return level

    def mask_at(self, level: int) -> Value | None:
        for scope in reversed(self.chain[: level + 1]):
            if scope.mask is not None:
                return scope.mask
        return None

    def lane_level(self) -> int:
        """The level of the first scope that belongs to the vector."""
        return next(i for i, scope in enumerate(self.chain) if scope.lane)

    def enter(self, scope: Scope) -> Context:
        """Inside `scope`, a loop's body shared by all vectors; a vector gets a scope of its own there."""
        chain = (*self.chain, scope)
        if self.lanes > 1:
            chain = (*chain, Scope(scope.cursor, lane=True))
        return Context(chain, self.lanes, self.vector, self.offset)

    def under_mask(self, level: int, scope: Scope) -> Context:
        return Context((*self.chain[: level + 1], scope), self.lanes, self.vector, self.offset)

    def elsewhere(self, at: int, symbol: Expr, value: Value, key: object) -> Context:
        """The same point but for `symbol`, which the scope `at` of the chain defines: there it is `value`. What is
        known of that point is known in scopes of its own; equal keys share the outermost of them."""
        base = self.chain[at]
        moved = base.children.get(key)
        if moved is None:
            moved = base.children[key] = Scope(
                base.cursor, set(base.defines), {**base.values, symbol: value}, mask=base.mask
            )
            value.home = moved
        below = (
            Scope(s.cursor, set(s.defines), dict(s.values), lane=s.lane, mask=s.mask, barrier=s.barrier)
            for s in self.chain[at + 1 :]
        )
        return Context((*self.chain[:at], moved, *below), self.lanes, self.vector, self.offset)
