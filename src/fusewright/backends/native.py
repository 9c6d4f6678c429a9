"""Backend `native`: ATen graph → passes → loops → schedule → LLVM kernels and a native call plan.

The order of the stages is written here and nowhere else. Each stage is timed and announced on the event stream with its printed result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from fusewright import codegen, loops, schedule
from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.llvm import compile_kernels
from fusewright.events import KernelMade, StageDone
from fusewright.graph import passes
from fusewright.graph.printer import print_graph
from fusewright.loops.lower import lower
from fusewright.loops.printer import print_program
from fusewright.schedule import ScheduleOptions, schedule as make_schedule
from fusewright.schedule.printer import print_plan

Result = TypeVar("Result")


def _stage(to_compile: GraphToCompile, name: str, artifact: str, work: Callable[[], Result], text: Callable[[Result], str]) -> Result:
    started = time.perf_counter()
    result = work()
    to_compile.notify(StageDone(to_compile.function, name, lambda: text(result), time.perf_counter() - started, artifact))
    return result
