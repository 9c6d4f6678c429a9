"""Opcode handlers: one instruction, one handler, in a table by name; the families are the modules of this folder."""

from fusewright.capture.opcodes import build, calls, control, errors, loads, matching  # noqa: F401  (each enters its rows)
from fusewright.capture.opcodes.table import HANDLERS, unsupported

__all__ = ["HANDLERS", "unsupported"]
