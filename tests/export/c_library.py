"""The library without Python, by its C interface, from Python: what tests compare with eager."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RUNTIME = Path(__file__).resolve().parents[2] / "csrc" / "runtime"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool)  # fmt: skip
FILE, MACHINE, INPUT, MEMORY, RUN = range(1, 6)


class Failed(RuntimeError):
    """status: fw_status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Tensor(ctypes.Structure):
    """fw_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32), ("sizes", ctypes.c_int64 * 16),
        ("device", ctypes.c_int32), ("device_index", ctypes.c_int32),
    )  # fmt: skip
    owner: torch.Tensor  # of the memory, where Python owns it


def build(folder: Path) -> Path:
    made = folder / "libfusewright_runtime.so"
    command = ["c++", "-O1", "-std=c++17", "-shared", "-fPIC", "-fopenmp", *RUNTIME.glob("*.cpp"), "-o", made, "-ldl"]
    subprocess.run(list(map(str, command)), check=True)
    return made


def described(tensor: torch.Tensor, address: int | None = None) -> Tensor:
    """address: of its memory on GPU 0, where that is another one than the tensor's. The result keeps the tensor alive."""
    on_gpu = address is not None or tensor.device.type == "cuda"
    sizes = (ctypes.c_int64 * 16)(*tensor.shape)
    data = tensor.data_ptr() if address is None else address
    made = Tensor(data, DTYPES.index(tensor.dtype), tensor.dim(), sizes, int(on_gpu), 0)
    made.owner = tensor
    return made


class CLibrary:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.c = ctypes.CDLL(self.path)
        self.torch: ctypes.CDLL | None = None
        self.c.fw_last_error.restype = ctypes.c_char_p
        self.c.fw_output_count.restype = ctypes.c_size_t

    def torch_guards(self) -> int:
        """How many stream guards of the tests' libtorch_cuda.so live."""
        return ctypes.c_int.in_dll(self.torch, "fake_guards").value if self.torch is not None else 0

    def check(self, status: int) -> None:
        if status:
            raise Failed(status, self.c.fw_last_error().decode())

    def load(self, path: Path) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.check(self.c.fw_load(str(path).encode(), ctypes.byref(made)))
        return made

    def close(self, package: ctypes.c_void_p) -> None:
        self.c.fw_close(package)

    def run(self, package: ctypes.c_void_p, inputs: Sequence[Tensor], stream: int | None = None) -> list[torch.Tensor]:
        """The results, on the CPU. stream: of the GPU; it is not waited for but for taking the results from there."""
        results = self.run_kept(package, inputs, stream)
        return [self.taken(result) for result in results]

    def run_kept(self, package: ctypes.c_void_p, inputs: Sequence[Tensor], stream: int | None = None) -> list[Tensor]:
        size = ctypes.c_size_t
        count = self.c.fw_output_count(package, size(0))
        given, made = (Tensor * len(inputs))(*inputs), (Tensor * count)()
        words: list[Any] = [package, size(0), given, size(len(inputs)), made, size(count)]
        self.check(self.c.fw_run(*words) if stream is None else self.c.fw_run_on(*words, ctypes.c_void_p(stream)))
        return list(made)

    def taken(self, result: Tensor) -> torch.Tensor:
        self.check(self.c.fw_to_cpu(ctypes.byref(result)))
        dtype, shape = DTYPES[result.dtype], tuple(result.sizes[: result.ndim])
        made = torch.empty(shape, dtype=dtype)
        ctypes.memmove(made.data_ptr(), result.data, made.numel() * dtype.itemsize)
        self.c.fw_free(ctypes.byref(result))
        return made
