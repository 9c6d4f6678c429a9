"""What Triton's generator refuses, asked of loops before they are scheduled: lowering then leaves that one operator to
PyTorch.

Takes expressions and operations of the loop IR; gives the reason, or nothing. Always holds: the answer is that of the
functions which write the kernel's text, so that what is not refused here is not refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusewright.base.records import dataclass, field
from fusewright.codegen.analysis import children
from fusewright.codegen.device_kernel import Unsupported
from fusewright.codegen.triton import indices, operations, reductions
from fusewright.codegen.triton.tiles import check_store
from fusewright.loops.ir import (
    Apply,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    Operation,
    Pointwise,
    Reduction,
    Scan,
)
from fusewright.sizes.expressions import Dim


@dataclass(slots=True)
class Refusals:
    """known: expressions that can be generated. Of one graph, whose expressions share their parts."""

    known: set[Expression] = field(default_factory=set)

    def of(self, made: Iterable[Expression | Operation]) -> str:
        """Why a kernel cannot hold one of these; nothing where kernels can hold all."""
        try:
            for one in made:
                self._values(list(_parts(one)))
        except Unsupported as reason:
            return str(reason)
        return ""

    def _values(self, waiting: list[Expression]) -> None:
        found: set[Expression] = set()
        while waiting:
            expr = waiting.pop()
            if expr not in self.known and expr not in found:
                _value(expr)
                found.add(expr)
                waiting.extend(children(expr))
        self.known |= found


def _parts(made: Expression | Operation) -> Iterator[Expression]:
    """The values that it computes, once what it does with them is known to be possible."""
    match made:
        case Expression():
            yield made
        case Pointwise(stores=stores):
            for store in stores:
                check_store(store.mode, store.value.dtype)
                _index(store.index)
                yield from (store.value, *(value for _, value in store.bindings))
        case Reduction(kind=kind, value=value, index=index, finish=finish):
            reductions.check_reduction(kind, value.dtype)
            _index(index)
            yield from (value, finish)
        case Scan(value=value, index=index, finish=finish):
            reductions.check_scan(value.dtype)
            _index(index)
            yield from (value, finish)


def _value(expr: Expression) -> None:
    match expr:
        case Apply(args=args):
            operations.apply(expr, ["0"] * len(args), operations.Style())
        case Constant():
            operations.typed(expr)
        case Load(index=index) | IndexValue(index=index) | CheckedIndex(extent=index):
            _index(index)


def _index(index: Dim) -> None:
    indices.text_of(index, lambda symbol: (str(symbol), indices.NOTHING), lambda text, dims: text)
