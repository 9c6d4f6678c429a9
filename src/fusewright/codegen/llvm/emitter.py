"""What the parts of a kernel's generation ask of its emitter (kernel.py), so that none of them imports it."""

from __future__ import annotations

from typing import Protocol

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Shape, StageView
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.evaluate import Evaluator
from fusewright.codegen.llvm.emit.indexing import Indexer
from fusewright.codegen.llvm.emit.loops import Loops
from fusewright.codegen.llvm.emit.memory import Pointer
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.loops.ir import Expression
from fusewright.schedule.plan import Kernel, Store
from fusewright.sizes.expressions import Dim

SIGNATURE = "(ptr %buffers, ptr %sizes, i64 %begin, i64 %end, ptr %status)"
Pending = list[tuple[Store, Value]]
"""Stores whose values are known, and that are written later."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """body: the function's text after its name. extent, grain: as in KernelCode."""

    body: str
    extent: Dim
    grain: int


class KernelEmitter(Protocol):
    """The emitter of one kernel as one LLVM function."""

    b: FunctionBuilder
    evaluator: Evaluator
    freed: list[str]
    indexer: Indexer
    kernel: Kernel
    loops: Loops
    pointers: dict[str, Pointer]
    shape: Shape
    strategy: Strategy
    target: Target
    tiles: dict[Expression, str]

    def enter_stage(self, number: int) -> None: ...

    def position_type(self, view: StageView) -> str: ...

    def statements(
        self,
        view: StageView,
        ctx: Context,
        state: list[Value],
        mask: Value | None,
        ordered: bool,
        stores: Pending | None = None,
    ) -> list[Value]: ...

    def side_by_side(
        self, view: StageView, contexts: list[Context], groups: list[list[Value]], ordered: bool, masked: bool = True
    ) -> list[list[Value]]: ...

    def define(self, scope: Scope, name: str, value: Value) -> None: ...
