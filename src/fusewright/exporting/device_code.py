"""Machine code of a package's GPU kernels: made for named architectures, and chosen for the GPU that is there.

Takes kernels and architectures ("sm_80"); gives the bytes of a part: a line of JSON, then cubins and PTX. Takes that
part and a plan; gives its functions on this process's GPUs. Always holds: a cubin runs on the architecture that it is
for or, where that has no features of its own, on later ones of its generation; on others the driver compiles the PTX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fusewright import _native
from fusewright.base.errors import ExportError, ProgramFileError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.codegen.call_plan_types import CallPlan, LaunchCall
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.runtime import cuda_code
from fusewright.runtime.launch import DeviceFunction, device_key

TARGET = "cuda"
"""What a version for GPUs has as its target."""
_ARCH = re.compile(r"sm_([1-9][0-9]{1,2})\Z")
_OWN_FEATURES = 90
"""From here on Triton makes code for an architecture with its own features, which no other runs (sm_90a)."""


_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory that a kernel may have, by architecture: table "technical specifications per compute capability" of
CUDA's programming guide."""


def arch_of(target: Any) -> int | None:
    """80 for "sm_80"; None for what is no such target."""
    found = _ARCH.match(target) if isinstance(target, str) else None
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class _Code:
    """arch, ptx: what it is. name, shared, warps: of a launch."""

    arch: int
    ptx: bool
    name: str
    shared: int
    warps: int
    start: int
    size: int


def written(kernels: Iterable[DeviceKernel], archs: Iterable[int]) -> bytes:
    """The part with the code of these kernels. Raises ExportError where one cannot be made for an architecture."""
    wanted = {kernel.key: kernel for kernel in kernels}
    for arch in archs:
        cuda_code.request(wanted.values(), arch, ptx=True)
    records: dict[str, list[dict[str, Any]]] = {}
    data = bytearray()
    for key, kernel in wanted.items():
        for arch in archs:
            try:
                launch, cubin = cuda_code.made(key, arch, ptx=True)
            except cuda_code.CompileError as error:
                raise ExportError(f"kernel {kernel.name} cannot be made for sm_{arch}: {error}") from error
            most = 1024 * _SHARED_KIB.get(arch, 48)
            if launch["shared"] > most:
                raise ExportError(
                    f"kernel {kernel.name}, as it was chosen for this machine's GPU, needs {launch['shared']} bytes of "
                    f"shared memory, and sm_{arch} has {most}: make the package on such a GPU"
                )
            text = launch["ptx"].encode()
            for ptx, code in ((False, cubin), (True, text)):
                place = {"start": len(data), "size": len(code)}
                about = {name: launch[name] for name in ("name", "shared", "warps")}
                records.setdefault(key, []).append({"arch": arch, "ptx": ptx, **about, **place})
                data += code
    return json.dumps(records).encode() + b"\n" + data


def fits(archs: Iterable[int]) -> bool:
    """Whether some code for these runs on every GPU of this process; there is at least one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = list(archs)
    here = [cuda_code.processor(index).arch for index in range(count)]
    return bool(here) and all(any(_rank(arch, ptx, own) for arch in known for ptx in (False, True)) for own in here)


def _rank(arch: int, ptx: bool, own: int) -> int:
    """How good code for `arch` is on a GPU of architecture `own`; 0: it does not run there."""
    if arch == own:
        return 1 if ptx else 3000
    if arch > own or arch >= _OWN_FEATURES:
        return 0
    if not ptx:
        return 1000 + arch if arch // 10 == own // 10 else 0
    return 1 + arch


def functions(part: bytes, plan: CallPlan) -> dict[str, DeviceFunction]:
    """The plan's kernels on this process's GPUs, by `device_key`. Raises ProgramFileError for a damaged part."""
    head, _, data = part.partition(b"\n")
    records = _records(head, len(data))
    found: dict[str, DeviceFunction] = {}
    for step in plan.steps:
        if not isinstance(step, LaunchCall):
            continue
        own = cuda_code.processor(step.device).arch
        codes = records.get(step.key, [])
        best = max(codes, key=lambda code: _rank(code.arch, code.ptx, own), default=None)
        if best is None or not _rank(best.arch, best.ptx, own):
            raise ProgramFileError(f"there is no code of kernel {step.name} for sm_{own}")
        key = device_key(step.key, step.device)
        if key not in found:
            code = data[best.start : best.start + best.size]
            with torch.cuda.device(step.device):
                torch.cuda.current_stream()  # makes PyTorch create the device's context
                try:
                    handle, _, _ = _native.cuda_load(code, best.name, best.shared)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # what the driver says
                    raise ProgramFileError(f"code of kernel {step.name} for sm_{best.arch}: {error}") from error
            found[key] = DeviceFunction(handle, 32 * best.warps, best.shared)
    return found


def _records(head: bytes, size: int) -> Mapping[str, list[_Code]]:
    try:
        read = {key: [_Code(**one) for one in codes] for key, codes in json.loads(head.decode()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ProgramFileError(f"the code of GPU kernels is damaged: {error!s:.200}") from error
    for codes in read.values():
        for one in codes:
            numbers = (one.arch, one.shared, one.warps, one.start, one.size)
            sound = all(type(number) is int and 0 <= number < 1 << 40 for number in numbers) and type(one.name) is str
            if not sound or type(one.ptx) is not bool or one.start + one.size > size or one.warps > 32:
                raise ProgramFileError("the code of GPU kernels is damaged")
    return read
