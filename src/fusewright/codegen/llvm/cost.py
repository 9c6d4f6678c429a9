"""How much work one iteration of the parallel domain is, to say how many are worth a thread.

Takes a `Shape` and its `Strategy`; gives the grain. The model is coarse on purpose: memory traffic at a core's
out-of-cache bandwidth, plus operations at vector rate.
"""

from __future__ import annotations

from fusewright.codegen.analysis import Shape
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.codegen.llvm.strategy import Strategy, operation_cost
from fusewright.sizes.estimate import estimate

BYTES_PER_NS = 8.0
VECTOR_OPERATIONS_PER_NS = 2.0
THREAD_NS = 8000.0  # the least work that repays waking a thread (waking and joining cost 2 to 5 µs)


def iteration_ns(shape: Shape, strategy: Strategy) -> float:
    """Estimated time of one iteration of the parallel domain on one core."""
    dtypes = {name: ELEMENT_TYPES[dtype].size for name, dtype in zip(shape.kernel.buffers, shape.kernel.dtypes)}
    points = 1.0
    for axis in strategy.serial:
        points *= max(estimate(axis.extent), 1)
    for axis, block in strategy.domain:
        points *= min(block, max(estimate(axis.extent), 1)) if block else 1
    total = 0.0
    for view, vector in zip(shape.views, strategy.stage_axes):
        stage_points = points
        for axis in view.axes:
            stage_points *= max(estimate(axis.extent), 1)
        moved = sum(dtypes.get(access.buffer, 0) for access in view.accesses)
        scalar = strategy.vector is None and vector is None
        rate = VECTOR_OPERATIONS_PER_NS * (1 if scalar else strategy.lanes)
        total += stage_points * (moved / BYTES_PER_NS + operation_cost(view) / rate)
    return total


def grain_of(shape: Shape, strategy: Strategy) -> int:
    """Fewest iterations that are worth a thread, at least 1."""
    return max(1, int(THREAD_NS / max(iteration_ns(shape, strategy), 0.5) + 0.5))
