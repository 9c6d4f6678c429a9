"""The loader of object files: what it loads runs, what it does not know it refuses, and code goes with its owner."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch

from fusewright import _native
from fusewright.codegen.llvm import compile_kernels
from fusewright.runtime.machine_code import load_code
from tests.codegen.llvm.harness import run_code
from tests.codegen.llvm.test_module import scaled

pytestmark = pytest.mark.skipif(not _native.LOADS_OBJECTS, reason="llvmlite loads object files on this platform")


def resolve(name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def test_a_loaded_function_runs() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])
    x, y = torch.randn(5000), torch.zeros(5000)
    assert run_code(module, module.codes["k0"], {"a": x, "b": y}, parts=4) == 0
    torch.testing.assert_close(y, x * 2)


def test_no_page_is_writable_and_executable() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])
    code = load_code(module.object, [module.codes["k0"].symbol])
    address = next(iter(code.addresses.values()))
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            assert rights.startswith("r-x")
            return
    pytest.fail("the code is not mapped")


def test_code_is_unmapped_with_its_owner() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    owners = [_native.MachineCode(module.object, resolve) for _ in range(200)]
    held = mappings()
    del owners
    assert mappings() <= held - 200


def test_a_missing_function_is_refused() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])
    with pytest.raises(ValueError, match="no function fw_none"):
        load_code(module.object, ["fw_none"])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(64), b"\x7fELF" + bytes(200)])
def test_what_is_no_object_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        _native.MachineCode(data, resolve)


def test_damaged_object_files_never_crash_the_loader() -> None:
    """Entries of the disk cache are checked by hash; the loader does not depend on it."""
    module = compile_kernels([scaled("k0", "a", "b"), scaled("k1", "a", "b", 3.0)])
    generator = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(module.object)
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        try:
            _native.MachineCode(bytes(data), lambda name: 0)
        except ValueError:
            refused += 1
    assert refused > 200


def test_what_the_resolver_raises_reaches_the_caller() -> None:
    def kernel_with_call() -> bytes:
        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.lgamma(x)

        return _object_of(f, torch.rand(100))

    def fail(name: str) -> int:
        raise KeyError(name)

    with pytest.raises(KeyError, match="Sleef"):
        _native.MachineCode(kernel_with_call(), fail)


def _object_of(function: object, *args: torch.Tensor) -> bytes:
    import fusewright
    from fusewright.backends import graph_cache

    found: list[bytes] = []
    original = graph_cache.load_plan
    try:
        graph_cache.load_plan = lambda *args: (found.append(args[1].code), original(*args))[1]  # type: ignore[assignment]
        fusewright.compile(function)(*args)
    finally:
        graph_cache.load_plan = original
    return found[0]
