"""Which kernels run side by side: neighbouring kernels that do not depend on one another share one parallel region.

Takes the steps in their order; gives them with `RunKernel.horizontal` set. Always holds: no kernel of a region writes
what another one of it reads or writes, or writes to an argument while another one checks indices (a call that fails a
check must not have begun to write). The update of two hundred parameters is so one region over a table of kernels,
in place of two hundred regions; equal bodies share their machine code anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusewright.base.records import replace
from fusewright.loops.ir import Buffer
from fusewright.schedule.expressions import survey
from fusewright.schedule.options import ScheduleOptions
from fusewright.schedule.plan import Kernel, RunKernel, Step, roots
from fusewright.sizes.estimate import estimate


def fuse_horizontally(
    steps: Sequence[Step],
    kernels: Mapping[str, Kernel],
    buffers: Mapping[str, Buffer],
    shared: Mapping[str, frozenset[str]],
    options: ScheduleOptions,
) -> list[Step]:
    """The steps, with the kernels marked that join the region of the step before. `shared`: buffers that are one
    memory."""
    result: list[Step] = []
    region = _Region(buffers, shared)
    for step in steps:
        if not isinstance(step, RunKernel) or not _may_join(kernels[step.kernel], buffers, options):
            region = _Region(buffers, shared)
            result.append(step)
            continue
        kernel = kernels[step.kernel]
        joins = 0 < region.count < options.max_horizontal and region.independent(kernel)
        if not joins:
            region = _Region(buffers, shared)
        region.add(kernel)
        result.append(replace(step, horizontal=joins))
    return result


def _may_join(kernel: Kernel, buffers: Mapping[str, Buffer], options: ScheduleOptions) -> bool:
    """On a CPU; and new memory that is written must be little, because what a region writes is alive at the same
    time."""
    fresh = [name for name in kernel.written if buffers[name].role in ("temporary", "output")]
    new_bytes = sum(estimate(buffers[name].span(), options.examples) * buffers[name].element.itemsize for name in fresh)
    return new_bytes <= options.horizontal_bytes and all(buffers[name].device.type == "cpu" for name in kernel.buffers)


class _Region:
    """What the kernels of one region touch. Buffers that share memory go by one name."""

    def __init__(self, buffers: Mapping[str, Buffer], shared: Mapping[str, frozenset[str]]) -> None:
        self.buffers, self.shared = buffers, shared
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.checks = self.updates = False
        self.count = 0

    def _names(self, names: Sequence[str] | frozenset[str]) -> set[str]:
        found = set(names)
        for name in names:
            found |= self.shared.get(name, frozenset())
        return found

    def independent(self, kernel: Kernel) -> bool:
        """Whether the kernel may run at the same time as those of the region."""
        touched, written = self._names(kernel.buffers), self._names(kernel.written)
        if (self.checks and self._updates(kernel)) or (self.updates and _checks(kernel)):
            return False
        return not (touched & self.writes or written & self.reads)

    def _updates(self, kernel: Kernel) -> bool:
        return any(self.buffers[name].role in ("input", "constant") for name in self._names(kernel.written))

    def add(self, kernel: Kernel) -> None:
        self.reads |= self._names(kernel.buffers)
        self.writes |= self._names(kernel.written)
        self.checks = self.checks or _checks(kernel)
        self.updates = self.updates or self._updates(kernel)
        self.count += 1


def _checks(kernel: Kernel) -> bool:
    return any(survey(roots(one)).checks for stage in kernel.stages for one in stage.statements)


def regions(steps: Sequence[Step]) -> list[int]:
    """For each step the number of its region: kernels that run at the same time share one. Numbers grow with the
    steps."""
    now = -1
    found = []
    for step in steps:
        if not (isinstance(step, RunKernel) and step.horizontal):
            now += 1
        found.append(now)
    return found
