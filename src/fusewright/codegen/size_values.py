"""The value table of a call plan: every integer that a step needs, constants in place and symbolic ones computed by a
short program.

Takes `Dim`s; gives indices into one table of int64, the program that fills the symbolic entries, and where the symbols
are read.
Always holds: an instruction reads only entries that are constants, symbols, or written by an earlier instruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusewright.sizes.expressions import Dim, Expr, Symbol, to_tuples

SIZE_OPERATIONS = ("+", "*", "//", "%", "min", "max")
"""In the order of the native `SizeOp`."""


class ValueTable:
    """Grows while a plan is built; equal sizes share an entry, equal runs of sizes share their place."""

    def __init__(self, symbols: Mapping[Expr, tuple[int, int]]) -> None:
        self.initial: list[int] = []
        self.symbols: list[tuple[int, int, int]] = []
        self.program: list[tuple[int, int, int, int]] = []
        self.texts: dict[int, str] = {}
        self._places = {symbol.name: place for symbol, place in symbols.items() if isinstance(symbol, Symbol)}
        self._entries: dict[object, int] = {}
        self._runs: dict[tuple[Dim, ...], int] = {}

    def _new(self, value: int = 0) -> int:
        self.initial.append(value)
        return len(self.initial) - 1

    def of(self, dim: Dim) -> int:
        """The entry that holds `dim`. Raises ValueError for a symbol that no input gives."""
        entry = self._entry(to_tuples(dim))
        if not isinstance(dim, int):
            self.texts.setdefault(entry, str(dim))
        return entry

    def _entry(self, tree: object) -> int:
        found = self._entries.get(tree)
        if found is None:
            found = self._entries[tree] = self._make(tree)
        return found

    def _make(self, tree: object) -> int:
        if isinstance(tree, int):
            return self._new(tree)
        assert isinstance(tree, tuple)
        if tree[0] == "sym":
            if tree[1] not in self._places:
                raise ValueError(f"size symbol {tree[1]} is given by no input")
            position, dim = self._places[tree[1]]
            if position < 0:
                return self._new(dim)  # the number itself
            entry = self._new()
            self.symbols.append((entry, position, dim))
            return entry
        left, right = self._entry(tree[1]), self._entry(tree[2])
        entry = self._new()
        self.program.append((SIZE_OPERATIONS.index(tree[0]), entry, left, right))
        return entry

    def run(self, dims: Sequence[Dim]) -> int:
        """The first of consecutive entries that hold `dims` (0 when there are none)."""
        key = tuple(dims)
        if not key:
            return 0
        found = self._runs.get(key)
        if found is not None:
            return found
        sources = [None if isinstance(dim, int) else self.of(dim) for dim in key]
        zero = self._entry(0) if any(source is not None for source in sources) else 0
        first = len(self.initial)
        for dim, source in zip(key, sources, strict=True):
            entry = self._new(dim if isinstance(dim, int) else 0)
            if source is not None:
                self.program.append((SIZE_OPERATIONS.index("+"), entry, source, zero))
                self.texts[entry] = str(dim)
        self._runs[key] = first
        return first

    def text(self, entry: int) -> str:
        """What the entry holds: a number, or the size as it was written."""
        return self.texts.get(entry, str(self.initial[entry]))
