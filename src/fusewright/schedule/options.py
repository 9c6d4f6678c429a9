"""What a caller may choose about scheduling.

Takes nothing; gives `ScheduleOptions`. Always holds: a schedule depends on the program and on these options alone,
never on the machine (in particular not on the number of threads), so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.base.records import dataclass, field
from fusewright.sizes.expressions import Expr


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """fusion: False gives one kernel an operation (to find out which fusion is at fault). fuse_limit: merges allowed
    (-1: no limit), for bisection.

    lanes: outer points that a machine handles at once where neighbouring elements lie along the outer axes (a GPU's
    block of columns), and held_rows: rows of them that it holds; smallest_chunk: reduced points of a chunk below which
    another one does not pay; gathered_chunk: the same where values are read through an index (each point then waits for
    memory: shorter chunks pay, of small reductions too). 0: no difference. max_buffers, max_statements: bounds of one
    kernel. scratch_bytes: bound of one kernel's row memory. min_parallel: outer iterations below which a kernel cannot
    keep a machine busy. small_points: iterations so few that parallelism does not matter; whole_row: neighbours in
    memory that one program takes as soon as several and another kernel would (a GPU's; a quarter where such programs
    would be very few), whole_column: the same of what lies apart. chunk_points: reduced points from which a reduction
    with little outer parallelism is split. own_bytes: temporaries from this size on have memory of their own, from
    their first writer to their last reader; None: all of them share one arena, which stays. max_horizontal: kernels of
    one parallel region; horizontal_bytes: new memory that a kernel in such a region may write, at the sizes of the call
    that is compiled for (examples).
    """

    fusion: bool = True
    fuse_limit: int = -1
    max_buffers: int = 24
    max_statements: int = 200
    scratch_bytes: int = 256 * 1024
    min_parallel: int = 32
    small_points: int = 32 * 1024
    chunk_points: int = 64 * 1024
    chunks: int = 64
    smallest_chunk: int = 2048
    whole_row: int = 0
    whole_column: int = 0
    gathered_chunk: int = 0
    lanes: int = 1
    held_rows: int = 0
    tiny_points: int = 4096
    own_bytes: int | None = None
    max_horizontal: int = 1024
    horizontal_bytes: int = 1024 * 1024
    examples: Mapping[Expr, int] = field(default_factory=dict, compare=False)

    def longest_row(self, rows: int) -> int:
        """`whole_row`, where there are so many."""
        return self.whole_row if rows * LEAST_SHARE >= self.min_parallel else self.whole_row // 4


LEAST_SHARE = 12
"""Rows that one program each takes leave most of a machine idle below this part of `min_parallel`."""
