"""The schedule's result: fused kernels, and the order in which kernels and library operators run, with memory placed.

Takes nothing; defines the types between `schedule`, `codegen` and `runtime`.

A kernel is two levels of loops. `outer` axes are shared by all stages and their iterations are independent (they may
run in parallel, in any order, and be vectorised). For each outer point the stages run in order; each runs its own inner
axes. A layer norm is: outer (row); stage 1 over columns reduces the mean; stage 2 reduces the squared deviations; stage
3 stores. A column sum is: outer (column); one stage over rows (code generation vectorises the outer axis).
Pure pointwise work has outer axes and one stage without inner axes, or rows and columns split between them: code
generation treats both alike.
"""

from __future__ import annotations

from typing import Literal

import torch

from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.loops.ir import Axis, Buffer, Expression, Extern, Output, ReductionKind, Store
from fusewright.sizes.expressions import Dim, Expr


@dataclass(frozen=True, slots=True)
class Define:
    """Names a value for later statements of the same stage (a stored value that is read again in the same iteration).

    In a stage without axes, the name stays visible to every later stage of the same outer point, as a reduction's
    result does.
    """

    local: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Reduce:
    """Accumulates `value` over the stage's inner axes into local `local`, available to later stages of the same outer
    point.

    accumulator dtype = value.dtype; argmax/argmin give int64 positions in the flattened inner axes (first extreme, NaN
    wins).
    """

    local: str
    kind: ReductionKind
    value: Expression


@dataclass(frozen=True, slots=True)
class ScanStep:
    """A running accumulation along the stage's only inner axis; `local` is the value at this step, usable by later
    statements. For "max"/"min", `position` (if given) is the local that holds the int64 position of the last
    extreme."""

    local: str
    kind: Literal["sum", "prod", "max", "min", "logaddexp"]
    value: Expression
    position: str | None = None


Statement = Define | Store | Reduce | ScanStep


def roots(statement: Statement) -> list[Expression]:
    """The expressions of a statement."""
    if isinstance(statement, Store):
        return [statement.value, *(value for _, value in statement.bindings)]
    return [statement.value]


@dataclass(frozen=True, slots=True)
class Stage:
    """`axes` nested inner loops (possibly none) around statements in order.

    Within a stage no buffer is loaded after it was stored (the value is forwarded through a local instead), so a load
    means the same value wherever it stands in the stage. A later stage may load from memory (a buffer or a Scratch)
    what an earlier one stored for the same outer point. All axes of a kernel are loop symbols named o0, o1, … (outer)
    and i0, i1, … (inner, outermost first, per stage).
    """

    axes: tuple[Axis, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory private to one outer iteration (a buffer that fusion made local to a row): `size` elements, indexed like a
    buffer.

    Indices hold inner axes only, never outer ones; each outer point sees only what it wrote itself. bool is one byte,
    as in buffers.
    """

    name: str
    dtype: torch.dtype
    size: Dim


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor of a product: its element at (batch, row or column, k) is buffer[outer + inner], `outer` over the
    kernel's outer axes, `inner` over the symbol `k`. checks: (outer part, inner part, extent); the element is 0 where
    their sum is not in 0..extent-1.

    value: the element computed where the product needs it, over the outer axes and `k` (no checks then): no step writes
    `buffer`."""

    buffer: str
    dtype: torch.dtype
    outer: Dim
    inner: Dim
    checks: tuple[tuple[Dim, Dim, int], ...] = ()
    value: Expression | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where a product's left operand may have something to add, of the places k that the product sums over: from
    `least` up to `end`, for rows from `first` to `last`. seen: where it may, if that is worth a question for each block
    of places."""

    first: Expr
    last: Expr
    least: Dim
    end: Dim
    seen: Expression | None = None


@dataclass(frozen=True, slots=True)
class Softmax:
    """What makes a product's left operand exp(score - most), for each row and place k of it: `score` is an expression
    over the outer axes, that k, and the local of `scores`, a product whose rows are those and whose columns are the
    places. Locals `most` and `total` are a row's largest score and the sum of its exponentials (NaN where the largest
    is infinite, as in a softmax). places: where scores may be above negative infinity."""

    scores: Product
    score: Expression
    most: str
    total: str
    places: Places


@dataclass(frozen=True, slots=True)
class Chain:
    """What a product's left operand, an expression, reads beside memory: elements of other products, by their locals.
    Rows of `parts` are those of the product, their columns are the places k. places: where the expression may not be
    0."""

    parts: tuple[Product, ...]
    places: Places


UNBOUNDED = 1 << 62
"""`Product.most` where any number of rows may come."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of matrix products: at outer point (batch, row, column), local `local` is the float32 sum over k < length
    of left * right.

    `left` does not depend on the column, `right` not on the row. full: float32 operands are multiplied in full
    precision (not in TF32). chosen: names in the kernel that stand for another buffer in each batch (its buffers, batch
    by batch). most: rows, where their number is none that is known; the kernel runs for 1 to `most`, which is UNBOUNDED
    where it stands alone.
    softmax, chain: what the left operand, an expression, is made of. besides: products of the same left operand that
    are summed at the same points.
    """

    local: str
    left: Operand
    right: Operand
    k: Expr
    length: int
    full: bool = True
    chosen: tuple[tuple[str, tuple[str, ...]], ...] = ()
    most: int = 0
    softmax: Softmax | None = None
    chain: Chain | None = None
    besides: tuple[Product, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """An operand of attention: rows of elements side by side, the first at buffer[outer], over the kernel's outer axes,
    and `step` elements from one to the next (0: one row at each point)."""

    buffer: str
    dtype: torch.dtype
    outer: Dim
    step: Dim = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(query @ key^T * scale + mask) @ value at outer point (batch, head, row) of a kernel: a row of `features`
    elements, from a row of the query and `columns` rows of key and value; mask: a row of `columns` elements. Scores,
    probabilities and sums are float32; a row whose keys are all masked gives zeros. causal: row r sees columns 0 to r.
    many: the kernel is for many rows at a time."""

    query: Rows
    key: Rows
    value: Rows
    mask: Rows | None
    result: Rows
    columns: Dim
    features: int
    scale: float
    causal: bool
    many: bool = False

    @property
    def operands(self) -> tuple[Rows, ...]:
        """All of them, the result last."""
        return (self.query, self.key, self.value, *([] if self.mask is None else [self.mask]), self.result)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fused kernel. `buffers` lists every buffer it touches, in parameter order (reads first); `sizes` the size
    symbols it needs.

    product: what the kernel multiplies before its only stage, which is pointwise, starts; `outer` is then batch, row
    and column. attention: what the kernel computes; it then has no stage.

    inplace: buffers in this kernel whose memory may be the same (the memory plan reused an input's space for an
    output): pairs (read, written); each element is read before the same element is written, in the same iteration.
    """

    name: str
    outer: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    buffers: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    written: frozenset[str]
    sizes: tuple[Expr, ...] = ()
    scratch: tuple[Scratch, ...] = ()
    inplace: tuple[tuple[str, str], ...] = ()
    locations: tuple[Location, ...] = ()
    origins: tuple[str, ...] = ()
    product: Product | None = None
    attention: Attention | None = None


@dataclass(frozen=True, slots=True)
class RunKernel:
    """horizontal: it runs at the same time as the step before it, which is a kernel, in one parallel region. when: it
    runs only where this size, which is 1 or 0, is 1."""

    kernel: str
    horizontal: bool = False
    when: Dim | None = None


@dataclass(frozen=True, slots=True)
class RunExtern:
    """when: as in RunKernel."""

    extern: Extern
    when: Dim | None = None


Step = RunKernel | RunExtern


@dataclass(frozen=True, slots=True)
class Placement:
    """A temporary's place in the arena: byte offset (aligned to 64) and size in bytes. Symbolic sizes give symbolic
    places."""

    offset: Dim
    size: Dim


@dataclass(slots=True)
class Plan:
    """Everything that code generation and the runtime need to run a graph.

    `placements` covers every temporary that a kernel or an out= extern writes; temporaries returned by an extern own
    their memory and are freed after the step numbered in `last_use`. Large temporaries of training own theirs too (see
    ScheduleOptions.own_bytes). `takes_over` (written → read): temporaries and outputs that are the memory of a
    temporary, which the kernel that writes them reads last; that temporary's memory is its own then. Where sizes decide
    how something is computed, the steps of both ways are here, each with its `when`.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    placements: dict[str, Placement] = field(default_factory=dict)
    arena_size: Dim = 0
    last_use: dict[str, int] = field(default_factory=dict)
    takes_over: dict[str, str] = field(default_factory=dict)
    size_symbols: dict[Expr, tuple[int, int]] = field(default_factory=dict)
