"""Opcode handlers: one instruction, one handler, in a table by name; the families are the modules of this folder."""

# each fills the table
from fusewright.capture.interpret.opcodes import build, calls, control, errors, loads, matching  # noqa: F401
from fusewright.capture.interpret.opcodes.table import HANDLERS, unsupported

__all__ = ["HANDLERS", "unsupported"]
