"""What a stage gives the next one, as a text that parses back: a compile can start at any stage.

Takes a loop program, a schedule or a call plan; gives its complete text (the debug folder holds them), and from the
text an equal object. Always holds: no text holds a tensor or a Python function; these are handed over beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.base.location import Location
from fusewright.codegen import call_plan_types as calls
from fusewright.loops import ir
from fusewright.loops.records_text import parse_record, print_record
from fusewright.schedule import plan

_PLACES = (ir.Axis, ir.Buffer, ir.BufferRef, ir.Output, Location)
RECORDS: dict[type, tuple[type, ...]] = {
    ir.LoopProgram: (*_PLACES, ir.Pointwise, ir.Reduction, ir.Scan, ir.Extern, ir.SkinnyGemm, ir.Store),
    plan.Plan: (
        *_PLACES, ir.Extern, ir.SkinnyGemm, ir.Store, plan.Attention, plan.Define, plan.Kernel, plan.Operand,
        plan.Chain, plan.Placement, plan.Places, plan.Product, plan.Reduce, plan.Rows, plan.RunExtern, plan.RunKernel,
        plan.ScanStep, plan.Scratch, plan.Softmax, plan.Stage,
    ),
    calls.CallPlan: (
        calls.CCall, calls.Gather, calls.Guarded, calls.KernelCall, calls.KernelGroup, calls.LaunchCall,
        calls.OutputSpec, calls.PythonCall, calls.SlotSpec, calls.SlotStep,
    ),
}  # fmt: skip
"""The results of stages that parse back, and the records that they hold."""


def complete_text(result: object) -> str:
    return print_record(result)[0]


def objects_of(result: object) -> tuple[Any, ...]:
    """What the text names by number: tensors, Python functions."""
    return print_record(result)[1]


def parse(text: str, objects: Sequence[Any] = ()) -> Any:
    """The loop program, schedule or call plan of a complete text. Raises ParseError."""
    return parse_record(text, {kind for whole, parts in RECORDS.items() for kind in (whole, *parts)}, objects)
