"""Packages of programs on a GPU by the library without Python, on a machine without a GPU: tests/export/fake_cuda.cpp is
the driver, its kernels are run by Triton's interpreter, and PyTorch's operators by its CPU. tests/gpu/test_gpu_package.py
runs the same on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright import _native
from fusewright.base.errors import RuntimeFallback
from fusewright.base.records import replace
from fusewright.codegen.call_plan_types import KernelCall, LaunchCall
from fusewright.codegen.device_kernel import MOST_PARAMETERS, DeviceKernel, Processor
from fusewright.exporting import device_code, package
from fusewright.runtime import cuda_code, launch, torch_c
from tests.codegen.triton.harness import function_of, mend_interpreter
from tests.export.c_library import INPUT, MACHINE, MEMORY, RUN, CLibrary, Failed, Tensor, build, described
from tests.export.test_c_runtime import Lists, Operators
from tests.runtime.plans import Schedule

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or not all(map(shutil.which, ("cmake", "c++"))),
    reason="needs a C++ compiler, and PyTorch without CUDA, whose allocator would ask its own driver",
)
GPU, ARCH = torch.device("cuda", 0), 80
HERE = Path(__file__).parent


class Driver:
    """The fake driver; its kernels are the ones that `made` has."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self.c.fake_rest.restype = ctypes.c_size_t
        self.made: dict[str, DeviceKernel] = {}
        self.launched: list[str] = []
        self.error: BaseException | None = None
        self.has_operators = False
        self.stays = 0  # allocations that belong to a recorded graph
        self.asserts = False  # whether a kernel that checks indices finds one out of range: the interpreter asserts nothing
        self.lock = threading.Lock()
        self.put_at: dict[int, ctypes.c_void_p] = {}
        unsigned, text = ctypes.c_uint, ctypes.c_char_p
        self.kind = ctypes.CFUNCTYPE(ctypes.c_int, text, text, unsigned, unsigned, unsigned, ctypes.POINTER(ctypes.c_void_p))
        self.callback = self.kind(self.launch)
        ctypes.c_void_p.in_dll(self.c, "fake_launch").value = ctypes.cast(self.callback, ctypes.c_void_p).value

    def __getitem__(self, name: str) -> int:
        kind = ctypes.c_int64 if name in ("live", "uploaded") else ctypes.c_int
        return kind.in_dll(self.c, f"fake_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.c, f"fake_{name}").value = value

    def launch(self, image: bytes, name: bytes, grid: int, threads: int, shared: int, parameters: Any) -> int:
        with self.lock:
            return self.interpreted(image, name, grid, threads, parameters)

    def interpreted(self, image: bytes, name: bytes, grid: int, threads: int, parameters: Any) -> int:
        try:
            kernel = self.made[image.decode().removeprefix("kernel ").strip()]
            assert name.decode() == kernel.symbol and threads == 32 * kernel.warps
            count = len(kernel.buffers) + len(kernel.spills)
            assert not (self.asserts and kernel.checks), "an index out of range"
            arguments: list[Any] = []
            for number, kind in enumerate(kernel.signature[:count]):
                if kind.startswith("*"):
                    arguments.append(self.memory(ctypes.c_void_p.from_address(parameters[number]).value, kind[1:]))
                else:
                    arguments.append(VALUES[kind].from_address(parameters[number]).value)
            arguments += [ctypes.c_int64.from_address(parameters[count + i]).value for i in range(len(kernel.sizes))]
            mend_interpreter()
            function_of(kernel)[(grid,)](*arguments)
            self.launched.append(kernel.name)
        except AssertionError as error:
            self.error = error
            return 710  # what a driver says of an assertion in a kernel
        except BaseException as error:
            self.error = error
            return 999
        return 0

    def put(self, tensor: torch.Tensor, offset: int) -> Tensor:
        """The tensor on the GPU, so many bytes behind the start of its memory."""
        start = ctypes.c_void_p()
        size = tensor.numel() * tensor.itemsize
        self.c.cuCtxSetCurrent(None)
        self.c.cuMemAlloc_v2(ctypes.byref(start), ctypes.c_size_t(size + offset))
        address = (start.value or 0) + offset
        words = ctypes.c_void_p(address), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), None
        assert self.c.cuMemcpyHtoDAsync_v2(*words) == 0
        self.put_at[address] = start
        return described(tensor, address)

    def drop(self, tensor: Tensor) -> None:
        if tensor.device:
            assert self.c.cuMemFree_v2(self.put_at.pop(tensor.data)) == 0

    def memory(self, start: int, kind: str) -> torch.Tensor:
        """The device memory at this address: the interpreter takes no more of it. What operators return is PyTorch's."""
        size = self.c.fake_rest(ctypes.c_void_p(start))
        assert start % 16 == 0 and (size or self.has_operators), "a kernel is given memory that is not the GPU's"
        dtype = DTYPES[kind]
        return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(start), dtype=dtype)


DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "i1": torch.bool,
}  # fmt: skip
VALUES = {"fp32": ctypes.c_float, "fp64": ctypes.c_double, "i64": ctypes.c_int64, "i32": ctypes.c_int32}


def shared_library(folder: Path, name: str, *options: str) -> Path:
    made = folder / name
    words = ["c++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-Wl,-soname,{name}", HERE / "fake_cuda.cpp", *options, "-o", made]
    subprocess.run(list(map(str, words)), check=True)
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLibrary, Driver]:
    folder = tmp_path_factory.mktemp("gpu")
    driver = Driver(shared_library(folder, "libcuda.so.1"))
    torch_folder = Path(torch.__file__).parent / "lib"
    options = ("-DFAKE_TORCH", f"-L{torch_folder}", f"-Wl,-rpath,{torch_folder}", "-Wl,--no-as-needed", "-ltorch_cpu")
    made = CLibrary(build(folder))
    made.torch = ctypes.CDLL(str(shared_library(folder, "libtorch_cuda.so", *options)), ctypes.RTLD_GLOBAL)
    return made, driver


@pytest.fixture
def gpu(library: tuple[CLibrary, Driver], monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the library, the driver, a function that packages a program as one of a GPU)."""
    c, driver = library
    driver.made.clear()
    driver.launched.clear()
    driver.error = None
    driver.has_operators, driver.stays = False, 0
    driver["errors"] = driver["broken"] = 0
    before = driver["live"]

    def moved(value: Any) -> Any:
        """As it would be in a graph whose tensors are on a GPU; numbers as arguments stay on the CPU."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(moved, value))
        if isinstance(value, torch.device):
            return GPU
        return replace(value, device=GPU) if hasattr(value, "device") and hasattr(value, "stride") else value

    as_data = package.as_data

    def as_data_on_gpu(to_compile: Any) -> Any:
        for node in to_compile.graph.nodes:
            if node.op == "placeholder" and getattr(node.meta["type"], "shape", None) == ():
                continue
            node.meta["type"] = moved(node.meta["type"]) if "type" in node.meta else None
            node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}
        return as_data(to_compile)

    def written(kernels: Any, archs: Any) -> bytes:
        records, data = {}, b""
        for kernel in kernels:
            driver.made[kernel.key] = kernel
            code = f"kernel {kernel.key}".encode()  # what loads it sees to it that a text ends with a zero
            one = {"name": kernel.symbol, "shared": 96 << 10, "warps": kernel.warps, "start": len(data), "size": len(code)}
            records[kernel.key] = [{"arch": arch, "ptx": ptx, **one} for arch in archs for ptx in (False, True)]
            data += code
        return json.dumps(records).encode() + b"\n" + data

    def packaged(model: nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> Path:
        batch = fusewright.Dim("batch", 1, 64)
        shapes = tuple({0: batch} if one.dim() else None for one in args)
        with torch.no_grad():
            program = fusewright.export(model, args, dynamic_shapes=shapes)
            file = io.BytesIO()
            fusewright.package(program, file, targets=("sm_80",), **options)
        with zipfile.ZipFile(file) as archive, zipfile.ZipFile(path, "w") as other:
            parts = {name: archive.read(name) for name in archive.namelist()}
            for name in parts:
                if name.endswith("signature.json"):
                    signature = json.loads(parts[name])
                    for one in (*signature["leaves"], *signature["weights"].values()):
                        one["device"] = "cuda:0" if one["shape"] else "cpu"
                    parts[name] = json.dumps(signature).encode()
            manifest = json.loads(parts["package.json"])
            manifest["hashes"] = {name: hashlib.sha256(parts[name]).hexdigest() for name in manifest["hashes"]}
            parts["package.json"] = json.dumps(manifest).encode()
            for name, part in parts.items():
                other.writestr(name, part)
        return path

    monkeypatch.setattr(package, "as_data", as_data_on_gpu)
    monkeypatch.setattr(package, "_devices", lambda program: {GPU})
    monkeypatch.setattr(device_code, "written", written)
    available = launch.is_available
    monkeypatch.setattr(launch, "is_available", lambda symbol: hasattr(c.torch, symbol) if "_cuda_" in symbol else available(symbol))
    monkeypatch.setattr(cuda_code, "processor", lambda index: Processor(ARCH, 8))
    monkeypatch.setattr(cuda_code, "request", lambda *args, **kwargs: None)
    yield c, driver, packaged
    assert driver["live"] == before + driver.stays, "memory of the GPU was not given back"
    assert c.torch_guards() == 0
    assert driver["contexts"] == driver["modules"] == driver["errors"] == 0


class Block(nn.Module):
    """Kernels, temporary memory, products by C functions, a transposed result, and a number of the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 24)
        self.register_buffer("gain", torch.rand(24))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.last(F.gelu(self.norm(self.first(x)))) * self.gain + x * scale
        return torch.softmax(y, -1), y.transpose(1, 2), y.mean((1, 2))


class Pointwise(nn.Module):
    """No operator: needs no PyTorch. Results in other orders than row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x * self.scale + torch.arange(16), -1)
        z = (x + 1).unflatten(-1, (2, 2, 4))
        return y.cumsum(-1), z.permute(3, 0, 2, 1), z.transpose(1, 3), x.sum(-1, keepdim=True).expand(-1, 3), (x * 2).t()


class Tables(nn.Module):
    """Constants of the graph, and a check in a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x) * torch.tensor([[1.0] * 8 + [2.0] * 8]) + torch.zeros(16, device=x.device)


def one(*shape: int) -> Any:
    return lambda size: (torch.randn(size, *shape),)


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "block": (Block, lambda size: (torch.randn(size, 5, 24), torch.tensor(1.5))),
    "pointwise": (Pointwise, one(16)),
    "tables": (Tables, lambda size: (torch.randint(0, 10, (size, 3)),)),
    "lists": (Lists, one(16)),
    "operators": (Operators, one(16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_are_eagers(name: str, gpu: Any, tmp_path: Path) -> None:
    """With arguments on the CPU and on the GPU, aligned there and not; waited for, and on a stream."""
    c, driver, packaged = gpu
    kind, arguments = MODELS[name]
    model = kind().eval()
    driver.has_operators = name in ("lists", "operators")
    loaded = c.load(packaged(model, arguments(2), tmp_path / "model.fwp"))
    for size in (1, 2, 7):
        given = arguments(size)
        expected = model(*given)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for offset, stream in ((None, None), (0, None), (4, 64)):
            offset = 8 if offset and name == "tables" else offset
            inputs = [driver.put(one, offset) if offset is not None and one.dim() else described(one) for one in given]
            found = c.run(loaded, inputs, stream)
            assert driver.error is None
            torch.testing.assert_close(tuple(found), expected, rtol=1e-4, atol=1e-4)
            for one in inputs:
                driver.drop(one)
    assert driver.launched
    c.close(loaded)


def test_memory_of_a_recorded_call_stays(gpu: Any, tmp_path: Path) -> None:
    """A graph that was recorded runs on the addresses that it was recorded with."""
    c, driver, packaged = gpu
    model, (x, scale) = Block().eval(), MODELS["block"][1](2)
    loaded = c.load(packaged(model, (x, scale), tmp_path / "model.fwp"))
    inputs, stream = [driver.put(x, 0), described(scale)], 64
    c.run(loaded, inputs, stream)
    before = driver["live"]
    driver["recorded"] = stream
    try:
        found = c.run(loaded, inputs, stream)
    finally:
        driver["recorded"] = 0
    torch.testing.assert_close(tuple(found), model(x, scale), rtol=1e-4, atol=1e-4)
    driver.stays = driver["live"] - before
    assert driver.stays > 0 and driver.error is None
    c.run(loaded, inputs, stream)
    assert driver["live"] == before + driver.stays
    driver.drop(inputs[0])
    c.close(loaded)


def test_an_argument_elsewhere_is_an_error(gpu: Any, tmp_path: Path) -> None:
    c, driver, packaged = gpu
    loaded = c.load(packaged(Block().eval(), MODELS["block"][1](2), tmp_path / "model.fwp"))
    x, scale = MODELS["block"][1](3)
    for change, message in (
        ({"device": 1, "device_index": 1}, "must lie on the CPU, or on GPU 0"), ({"device": 5}, "must lie on the CPU"),
    ):  # fmt: skip
        bad = described(x)
        for key, value in change.items():
            setattr(bad, key, value)
        with pytest.raises(Failed, match=message) as found:
            c.run(loaded, [bad, described(scale)])
        assert found.value.status == INPUT
    moved = driver.put(scale, 0)
    with pytest.raises(Failed, match="scale must lie on the CPU"):
        c.run(loaded, [described(x), moved])
    driver.drop(moved)
    c.close(loaded)


def test_an_index_out_of_range_is_an_error(gpu: Any, tmp_path: Path) -> None:
    c, driver, packaged = gpu
    loaded = c.load(packaged(Tables().eval(), MODELS["tables"][1](2), tmp_path / "model.fwp"))
    driver.asserts = True
    try:
        with pytest.raises(Failed, match="device-side assert") as found:
            c.run(loaded, [described(torch.full((2, 3), 9))])
    finally:
        driver["broken"], driver.asserts = 0, False
    assert found.value.status == RUN and isinstance(driver.error, AssertionError)
    c.close(loaded)


@pytest.mark.parametrize("name", ["block", "pointwise", "lists"])
def test_where_no_memory_is_left_all_is_given_back(name: str, gpu: Any, tmp_path: Path) -> None:
    """Each allocation in turn fails: of loading, then of a call."""
    c, driver, packaged = gpu
    kind, arguments = MODELS[name]
    driver.has_operators = name == "lists"
    path = packaged(kind().eval(), arguments(2), tmp_path / "model.fwp")
    before = driver["live"]
    for loads in (True, False):
        loaded = None if loads else c.load(path)
        kept = driver["live"]
        for number in range(1, 100):
            driver["fails"] = number
            driver["allocations"] = 0
            try:
                made = c.load(path) if loaded is None else c.run(loaded, [described(one) for one in arguments(3)])
            except Failed as error:
                assert error.status == MEMORY and "out of memory" in str(error)
                assert driver["live"] == kept and c.torch_guards() == 0
                continue
            finally:
                driver["fails"] = 0
            break
        assert loads or number > 1
        c.close(made if loaded is None else loaded)
    assert driver["live"] == before


def test_a_kernel_that_finds_no_memory_leaves_nothing(library: tuple[CLibrary, Driver]) -> None:
    """Each step of loading it for Python fails in turn, as an allocation of PyTorch's on a GPU does."""
    _, driver = library
    driver.c.cuCtxSetCurrent(None)
    for number in range(1, 7):
        driver["fails"], driver["allocations"], modules = number, 0, driver["modules"]
        with contextlib.nullcontext() if number == 6 else pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            _native.cuda_load(b"kernel of a test", "of a test", 96 << 10)
        assert driver["modules"] - modules == (number == 6)
    driver["fails"], driver["modules"] = 0, 0
    with pytest.raises(RuntimeError, match="loading a kernel: refused") as refused:
        _native.cuda_load(b"no kernel", "of a test", 0)
    assert refused.type is RuntimeError


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's C functions of a GPU, for call plans: a device that is current, and its default stream."""
    number, place, places = ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)

    def stand_in(*kinds: Any) -> Any:
        def found(*given: Any) -> int:
            if kinds == (number, places):
                given[1][0] = None
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(found)

    kinds = {"cuda_stream": (number, places), "cuda_guard": (number, places), "cuda_guard_set": (place, number)}
    made = {torch_c.FUNCTIONS[name][0]: stand_in(*kinds.get(name, (place,))) for name in (*kinds, "delete_cuda_guard")}
    real = torch_c.address
    with monkeypatch.context() as patch:
        patch.setattr(
            torch_c, "address", lambda name: ctypes.cast(made[name], place).value if name in made else real(name)
        )
        torch_c.configure()
    yield
    torch_c.configure()


@pytest.mark.parametrize("writes", [False, True], ids=["", "behind a write to an argument"])
def test_a_launch_that_finds_no_memory(
    writes: bool, library: tuple[CLibrary, Driver], streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel with many parameters. What PyTorch keeps for later is given back, and it is started again. Where that is not enough, the call is
    repeated eagerly; what has written to an argument raises what an allocation would."""
    _, driver = library

    def kernel(image: bytes, name: bytes, grid: int, threads: int, parameters: Any) -> int:
        source, target = (ctypes.c_void_p.from_address(parameters[k]).value for k in range(2))
        ctypes.memmove(target, source, 16)
        return 0

    def empty_cache() -> None:
        driver["fails"] = driver["allocations"] + 1 if kept == "nothing" else 0

    monkeypatch.setattr(driver, "interpreted", kernel)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    driver.c.cuCtxSetCurrent(None)
    handle, _, _ = _native.cuda_load(b"kernel of a test", "of a test", 0)
    schedule = Schedule()
    x, out = schedule.input("x", 4), schedule.output("out", 4)
    if writes:
        schedule.call(torch.ops.aten.add_.Scalar, x, 1, out=[None], mutates=("x",))
    schedule.run("copy", None, [x, out], 1)
    plan = schedule.build(single=True)
    steps = tuple(
        LaunchCall(one.name, "a key", 0, one.buffers, (False, False), (False, True), one.extent, (one.extent,) * (MOST_PARAMETERS - 2))
        if isinstance(one, KernelCall) else one
        for one in plan.steps
    )  # fmt: skip
    functions = {launch.device_key("a key", 0): launch.DeviceFunction(handle, 32, 0)}
    native = launch.load(replace(plan, steps=steps), functions)
    for kept in ("nothing", "something"):
        driver["fails"] = driver["allocations"] + 1
        given = torch.ones(4)
        if kept == "something":
            assert native(given).tolist() == [2.0 if writes else 1.0] * 4
        else:
            with pytest.raises(RuntimeError, match="copy: launching a kernel: out of memory") as error:
                native(given)
            assert error.type is (torch.OutOfMemoryError if writes else RuntimeFallback)
    driver["fails"], driver["modules"] = 0, 0


def test_threads_share_a_package(gpu: Any, tmp_path: Path) -> None:
    c, _, packaged = gpu
    model = Block().eval()
    loaded = c.load(packaged(model, MODELS["block"][1](2), tmp_path / "model.fwp"))
    x, scale = MODELS["block"][1](3)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.extend(c.run(loaded, [described(x), described(scale)])[:1] for _ in range(2)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for (one,) in found:
        torch.testing.assert_close(one, model(x, scale)[0].detach())
    c.close(loaded)


def test_code_is_for_the_gpu_that_is_there(gpu: Any, tmp_path: Path) -> None:
    c, driver, packaged = gpu
    path = packaged(Pointwise().eval(), (torch.randn(2, 16),), tmp_path / "model.fwp")
    try:
        driver["arch"] = 75
        with pytest.raises(Failed, match="cuda: it is for sm_80, and GPU 0 is sm_75") as found:
            c.load(path)
        assert found.value.status == MACHINE
    finally:
        driver["arch"] = ARCH


def test_damaged_code_is_an_error(gpu: Any, tmp_path: Path) -> None:
    c, _, packaged = gpu
    path = packaged(Pointwise().eval(), (torch.randn(2, 16),), tmp_path / "model.fwp")
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith(".cuda"))
    head, _, code = parts[name].partition(b"\n")
    records = json.loads(head)
    changes = [{"start": -1}, {"size": 1 << 50}, {"warps": 99}, {"warps": 0}, {"name": 3}, {"ptx": 1}, {"arch": "90"}, {"shared": -1}]
    bad = [{key: [{**one, **change} for one in codes] for key, codes in records.items()} for change in changes]
    for part in (b"", b"{}\n", b"[1]\n", head, head + b"\n" + code[:8], head + b"\nxxxx" + code, *(json.dumps(one).encode() + b"\n" + code for one in bad)):
        manifest = json.loads(parts["package.json"])
        manifest["hashes"][name] = hashlib.sha256(part).hexdigest()
        with zipfile.ZipFile(tmp_path / "bad.fwp", "w") as other:
            for own, data in {**parts, name: part, "package.json": json.dumps(manifest).encode()}.items():
                other.writestr(own, data)
        with pytest.raises(Failed):
            c.load(tmp_path / "bad.fwp")


def test_without_a_driver_it_is_an_error(gpu: Any, tmp_path: Path) -> None:
    c, _, packaged = gpu
    path = packaged(Pointwise().eval(), (torch.randn(2, 16),), tmp_path / "model.fwp")
    program = f"import pathlib, sys; sys.path.insert(0, {str(HERE.parents[1])!r})\nfrom tests.export.c_library import *\n"
    program += f"try: CLibrary(pathlib.Path({c.path!r})).load({str(path)!r})\nexcept Failed as error: print(error.status, error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 ") and "no CUDA driver or no GPU is found" in done.stdout
