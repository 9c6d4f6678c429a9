"""The driver: what is shared, what is reported, and object files that are loaded back."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import fusewright
from fusewright.base.location import Location
from fusewright.base.options import TARGETS
from fusewright.codegen.llvm import compile_kernels, load_object, target_of
from fusewright.codegen.signature import signature
from fusewright.loops.ir import Axis, Store, apply, constant, load, local_value
from fusewright.runtime import host
from fusewright.schedule.plan import Kernel, Reduce, Stage
from fusewright.sizes.expressions import evaluate, loop_symbol, symbol
from tests.codegen.llvm.harness import kernel_of, loaded

F32 = torch.float32


def scaled(name: str, source: str, target: str, factor: float = 2.0, count: int = 5000) -> Kernel:
    i = loop_symbol("o0", count)
    value = apply("mul", load(source, i, F32), constant(factor, F32), dtype=F32)
    stages = [Stage((), (Store(target, i, value),))]
    return kernel_of(
        name,
        [Axis(i, count)],
        stages,
        {source: F32, target: F32},
        [target],
        locations=(Location("model.py", 12, "forward"),),
    )


def test_equal_kernels_share_one_function() -> None:
    first, second, other = scaled("k0", "a", "b"), scaled("k1", "c", "d"), scaled("k2", "a", "b", 3.0)
    assert signature(first) == signature(second) != signature(other)
    module = compile_kernels([first, second, other])
    assert module.codes["k0"].symbol == module.codes["k1"].symbol != module.codes["k2"].symbol
    assert module.codes["k1"].buffers == ("c", "d")


def test_keys_do_not_depend_on_what_else_is_compiled() -> None:
    alone = compile_kernels([scaled("k0", "a", "b")]).codes["k0"].key
    assert compile_kernels([scaled("k2", "a", "b", 3.0), scaled("k0", "x", "y")]).codes["k0"].key == alone


def test_the_source_shows_the_users_lines_and_the_loops() -> None:
    source = compile_kernels([scaled("k0", "a", "b")]).codes["k0"].source
    assert "model.py" in source
    assert "; kernel k0" in source
    assert "define void" in source


def test_an_object_file_runs_again_in_llvms_loader() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])
    code = module.codes["k0"]
    address = load_object(module.object, [code.symbol])[code.symbol]
    assert address != loaded(module.object, code.symbol).addresses[code.symbol]


def test_an_object_file_without_the_symbol_is_refused() -> None:
    module = compile_kernels([scaled("k0", "a", "b")])
    with pytest.raises(RuntimeError):
        load_object(module.object, ["fw_no_such_kernel"])


def test_nothing_to_compile() -> None:
    module = compile_kernels([])
    assert not module.codes and not module.object


def test_extent_and_grain() -> None:
    code = compile_kernels([scaled("k0", "a", "b", count=1_000_000)]).codes["k0"]
    extent = evaluate(code.extent, {})
    assert extent >= 64  # enough ranges for every thread
    assert 1 <= code.grain < extent


def test_importing_the_package_does_not_import_llvmlite() -> None:
    check = "import sys, fusewright.codegen.llvm; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_address_is_one_number_to_llvms_loop_passes() -> None:
    """What a loop around another one knows of an address is added to the buffer there, and frozen: loop strength reduction took 90 of the
    100 ms of bicubic resampling, whose 16 addresses are sums of minima of indices, before that."""
    width = symbol("s0", 0, None)
    row, column = loop_symbol("o0", 700), loop_symbol("i0", width)
    value = apply("mul", load("a", row * width + column, F32), load("b", row * width + column, F32), dtype=F32)
    stage = Stage((Axis(column, width),), (Reduce("r0", "sum", value),))
    result = Stage((), (Store("c", row, local_value("r0", F32)),))
    kernel = kernel_of("k0", [Axis(row, 700)], [stage, result], dict.fromkeys("abc", F32), ["c"], sizes=(width,))
    blocks = re.split(r"\n(?=\w+:\n)", compile_kernels([kernel]).codes["k0"].source)
    inside = [block for block in blocks if "load <" in block]
    assert len(inside) == 2, "the loop over several vectors and that over one"
    for block in inside:
        (counter,) = re.findall(r"(%\w+) = phi i64", block)
        bases = re.findall(rf"getelementptr float, ptr (%\w+), i64 {counter}\b", block)
        assert len(set(bases)) == 2 and all(f"{base} = freeze ptr" in "\n".join(blocks) for base in bases), block


MACHINES = {"native": None, "x86-64-v2": 62, "x86-64-v3": 62, "x86-64-v4": 62, "aarch64": 183}


@pytest.mark.parametrize("target", MACHINES)
def test_code_for_a_target(target):
    """An object file for the target's machine (ELF's number), whether it runs here or not."""
    assert set(MACHINES) == set(TARGETS)
    module = compile_kernels([scaled("k0", "a", "b")], target=target)
    machine = int.from_bytes(module.object[18:20], "little")
    assert MACHINES[target] in (None, machine) and f'target triple = "{target_of(target).triple}"' in module.ir


@pytest.mark.parametrize("target", MACHINES)
def test_a_compile_for_a_target(target):
    """A lesser target gives eager's answer; code that does not run here is never loaded."""

    def f(x):
        return torch.softmax(x, -1).exp() + x.sum()

    x = torch.randn(33, 65)
    compiled = fusewright.compile(f, options={"target": target, "disk_cache": False})
    if host.runs_here(*host.needs(target)):
        torch.testing.assert_close(compiled(x), f(x))
    else:
        with pytest.raises(fusewright.OptionError, match="does not run on this machine"):
            compiled(x)


@pytest.mark.parametrize("target", MACHINES)
def test_a_target_needs_what_its_code_uses(target, monkeypatch):
    machine, flags = host.needs(target)
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(flags))
    assert host.runs_here(machine, flags) and not host.runs_here("another", flags)
    for flag in flags:
        monkeypatch.setattr(host, "cpu_flags", lambda flag=flag: frozenset(flags) - {flag})
        assert not host.runs_here(machine, flags)
