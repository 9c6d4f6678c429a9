"""The statements of a kernel, each over what the kernel reads and its loops.

Takes a `Kernel`; gives what it sums and stores, without names of values (`Define`) and without row memory. Always
holds: row memory is read where it was written, element by element; else `Different` is raised.
"""

from __future__ import annotations

from collections.abc import Callable

from fusewright.base.records import dataclass, field, replace
from fusewright.loops.ir import Expression, Load, Store
from fusewright.schedule.expressions import Rewriter
from fusewright.schedule.plan import Define, Kernel, Reduce, Stage
from fusewright.sizes.expressions import Dim


class Different(Exception):
    """The kernel is none that is known to who reads it."""


@dataclass(slots=True)
class Statements:
    """known: what stands for a local value; whoever reads a kernel says it for that of a reduction, whose own local
    stays where nothing is said. scratch: (index, value) of what row memory holds."""

    known: dict[str, Expression] = field(default_factory=dict)
    scratch: dict[str, tuple[Dim, Expression]] = field(default_factory=dict)

    def inlined(self, value: Expression) -> Expression:
        """The value without names and row memory."""
        return Rewriter(
            lambda dim: dim, self._load, lambda node: self.known.get(node.name, node), lambda old, new: old
        ).visit(value)

    def _load(self, node: Load) -> Expression | None:
        if node.buffer not in self.scratch:
            return None
        index, value = self.scratch[node.buffer]
        if node.bindings or index != node.index:
            raise Different
        return value

    def read(
        self, kernel: Kernel, reduced: Callable[[Stage, Reduce], None], stored: Callable[[Stage, Store], None]
    ) -> None:
        """Calls reduced and stored, in order, for the kernel's reductions and for its stores to memory."""
        own = {scratch.name for scratch in kernel.scratch}
        for stage in kernel.stages:
            for statement in stage.statements:
                if isinstance(statement, Define):
                    self.known[statement.local] = self.inlined(statement.value)
                elif isinstance(statement, Reduce):
                    reduced(stage, replace(statement, value=self.inlined(statement.value)))
                elif not isinstance(statement, Store) or statement.mode != "write" or statement.bindings:
                    raise Different
                elif statement.buffer in own:
                    self.scratch[statement.buffer] = statement.index, self.inlined(statement.value)
                else:
                    stored(stage, replace(statement, value=self.inlined(statement.value)))
