"""Scheduling: from a graph as loops to a plan of fused kernels (`schedule`), and its memory (`with_memory`).

Takes a `LoopProgram`; gives a `Plan`. Always holds: running the plan's steps in order gives what running the program's
operations in order gives.
"""

from __future__ import annotations

from fusewright.schedule.driver import schedule, with_memory
from fusewright.schedule.options import ScheduleOptions

__all__ = ["ScheduleOptions", "schedule", "with_memory"]
