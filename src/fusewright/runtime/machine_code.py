"""Object files to callable addresses.

Takes the bytes of an object file that codegen/llvm made; gives the addresses of its functions and an owner that keeps
them valid.
Always holds: the code is unloaded when its owner dies, where this platform's loader is ours (Linux on x86-64);
elsewhere llvmlite loads it, for good. Loading imports no compiler where the loader is ours.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable

from fusewright import _native
from fusewright.base.records import dataclass
from fusewright.runtime import torch_c

_process = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """addresses: of each function, by symbol; valid as long as `owner` lives. size: bytes of memory."""

    addresses: dict[str, int]
    owner: object
    size: int


def _address(symbol: str) -> int:
    """The address of an outside function that a kernel calls: PyTorch's libraries first, then the process (C and its
    mathematics)."""
    found = torch_c.address(symbol)
    if found is None and hasattr(_process, symbol):
        found = ctypes.cast(getattr(_process, symbol), ctypes.c_void_p).value
    return found or 0


def load_code(data: bytes, symbols: Iterable[str]) -> LoadedCode:
    """The functions `symbols` of the object file `data`. Raises ValueError for a file that cannot be loaded here or
    lacks one of them."""
    wanted = set(symbols)
    if not wanted:
        return LoadedCode({}, None, 0)
    if _native.LOADS_OBJECTS:
        code = _native.MachineCode(data, _address)
        addresses, owner, size = code.addresses, code, code.size
    else:
        llvm = importlib.import_module("fusewright.codegen.llvm")  # lazy: brings llvmlite
        addresses, owner, size = llvm.load_object(data, wanted), None, len(data)
    missing = wanted - addresses.keys()
    if missing:
        raise ValueError(f"machine code cannot be loaded: it has no function {', '.join(sorted(missing))}")
    return LoadedCode(addresses, owner, size)
