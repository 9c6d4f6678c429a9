"""`save` and `load`: what is loaded is what was saved, and a damaged or hostile file is an error of ours."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import stat
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import fusewright
from fusewright import Dim, operators
from fusewright.runtime import artifact
from tests.export.test_export import MODELS, assert_same, mlp

FRESH = """
import sys, torch, fusewright
program = fusewright.load(sys.argv[1])
x = torch.load(sys.argv[2], weights_only=True)
torch.save([program.module()(one) for one in x], sys.argv[3])
try:
    program.module()(torch.randn(300, 4))
except fusewright.ProgramInputError as error:
    print(error)
"""


def exported(name="linear"):
    make, arguments, _, least = MODELS[name]
    torch.manual_seed(0)
    model = make()
    batch = Dim("batch", min=least, max=256)
    return model, fusewright.export(model, arguments(least), dynamic_shapes=({0: batch},))


def written(program) -> bytes:
    file = io.BytesIO()
    fusewright.save(program, file)
    return file.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_gives_what_eager_gives(name, tmp_path):
    if name == "bert":
        pytest.importorskip("transformers")
    model, program = exported(name)
    path = tmp_path / "program.fw"
    fusewright.save(program, path)
    arguments, least = MODELS[name][1], MODELS[name][3]
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        loaded = fusewright.load(source)
        assert str(loaded) == str(program)
        assert loaded.graph_signature.to_json() == program.graph_signature.to_json()
        assert written(loaded) == path.read_bytes()
        eager, module = copy.deepcopy(model), loaded.module()
        eager.load_state_dict(module.state_dict())
        for size in (least, 9):
            args = arguments(size)
            theirs = copy.deepcopy(args)
            assert_same(module(*args), eager(*theirs))
            assert_same(args, theirs)


def test_a_fresh_process_gives_the_same_bits(tmp_path):
    model, program = exported()
    paths = [str(tmp_path / name) for name in ("program.fw", "in", "out")]
    fusewright.save(program, paths[0])
    inputs = [torch.randn(size, 4) for size in (1, 64)]
    torch.save(inputs, paths[1])
    done = subprocess.run([sys.executable, "-c", FRESH, *paths], capture_output=True, text=True, check=True)
    found = torch.load(paths[2], weights_only=True)
    assert [tuple(one.shape) for one in found] == [(1, 10), (64, 10)]
    for one, x in zip(found, inputs, strict=True):
        assert torch.equal(one, model(x))
    assert "1 <= batch <= 256" in done.stdout and "test_save.py" in done.stdout


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(6, 4)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.again = self.tied
        self.register_buffer("top", whole[:3])
        self.register_buffer("bottom", whole[2:].t(), persistent=False)
        self.register_buffer("wide", torch.randn(1, 4).expand(50, 4))
        self.register_buffer("step", torch.randn(3)[::3])
        self.register_buffer("exact", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0, 3, dtype=torch.bfloat16))

    def forward(self, x):
        y = self.tied(x) @ self.bottom + self.again(x).sum()
        return y, self.top + 1, self.wide * self.step, self.exact * 1j, self.none


def test_memory_that_weights_share_is_kept_once():
    model = Shared()
    data = written(fusewright.export(model, (torch.randn(2, 4),)))
    loaded = fusewright.load(data)
    x = torch.randn(2, 4)
    assert_same(loaded.module()(x), model(x))
    state = loaded.state
    assert state["tied.weight"] is state["again.weight"]
    assert loaded.state_dict.keys() == model.state_dict().keys()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.getinfo("weights.safetensors").file_size < 2000


def test_the_weights_are_safetensors():
    safetensors = pytest.importorskip("safetensors.torch")
    model, program = exported()
    with zipfile.ZipFile(io.BytesIO(written(program))) as archive:
        found = safetensors.load(archive.read("weights.safetensors"))
    assert_same({name: found[name] for name in model.state_dict()}, dict(model.state_dict()))


def test_a_loaded_program_compiles():
    model, program = exported()
    module = fusewright.load(written(program)).module()
    x = torch.randn(7, 4)
    torch.testing.assert_close(fusewright.compile(module, fullgraph=True)(x), model(x))


@pytest.mark.parametrize("seed", range(200))
def test_random_damage_is_an_error_or_changes_nothing(seed):
    draw = random.Random(seed)
    data = bytearray(_good())
    if seed % 4 == 0:
        del data[draw.randrange(len(data)) :]
    for _ in range(draw.randrange(1, 4)):
        if data and seed % 4:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    try:
        loaded = fusewright.load(bytes(data))
    except fusewright.ProgramFileError:
        return
    good = fusewright.load(_good())
    assert str(loaded) == str(good) and loaded.graph_signature == good.graph_signature
    assert_same(dict(loaded.state), dict(good.state))


_kept: list[bytes] = []


def _good() -> bytes:
    if not _kept:
        _kept.append(written(exported()[1]))
    return _kept[0]


def rebuilt(change=None, more=(), compress=zipfile.ZIP_STORED, good=None) -> bytes:
    """The good file with parts changed, and valid checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good or _good())) as old, zipfile.ZipFile(file, "w", compress) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(name, data) if change else data)
        for entry, data in more:
            new.writestr(entry, data)
    return file.getvalue()


def _link():
    entry = zipfile.ZipInfo("graph.txt")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: rebuilt(more=[("../../evil", b"x")]), "unknown part"),
        (lambda: rebuilt(more=[("/etc/evil", b"x")]), "unknown part"),
        (lambda: rebuilt(more=[("data.pkl", b"x")]), "unknown part"),
        (lambda: rebuilt(more=[("graph.txt", b"x")]), "two parts"),
        (lambda: rebuilt(more=[(_link(), b"/etc/passwd")]), "two parts|symbolic link"),
        (lambda: rebuilt(compress=zipfile.ZIP_DEFLATED), "compressed"),
        (lambda: b"", "zip"),
        (lambda: b"PK\5\6" + bytes(18), "missing"),
    ],
)
def test_a_crafted_zip_is_refused(make, message):
    with pytest.raises(fusewright.ProgramFileError, match=message):
        fusewright.load(make())


def _text(old, new):
    def change(name, data):
        if name != "graph.txt":
            return data
        assert old in data.decode()
        return data.decode().replace(old, new).encode()

    return change


def _signature(edit):
    def change(name, data):
        if name != "signature.json":
            return data
        value = json.loads(data)
        edit(value)
        return json.dumps(value).encode()

    return change


def _header(edit):
    def change(name, data):
        if name != "weights.safetensors":
            return data
        (size,) = struct.unpack_from("<Q", data)
        value = json.loads(data[8 : 8 + size])
        edit(value)
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (_text("aten.relu.default", "os.system.default"), "graph.txt, line"),
        (_text("aten.relu.default", "aten.from_file.default"), "may not call"),
        (_text("aten.relu.default", "operator.attrgetter"), "names no operator"),
        (_text("aten.relu.default", "aten.__class__.default"), "graph.txt, line"),
        (_text("return (", "return (%nothing, "), "not defined"),
        (_text("return (", "return (" + "(" * 5000), "nested"),
        (_text("return (", "import os\nreturn ("), "cannot read"),
        (_signature(lambda s: s.update(format=99)), "format 99"),
        (_signature(lambda s: s["inputs"].pop()), "inputs do not fit"),
        (_signature(lambda s: s["inputs"][0].update(target="nothing")), "no parameter"),
        (_signature(lambda s: s["outputs"].pop()), "signature.json: 0 is no place of 0"),
        (_signature(lambda s: s["results"][0].update(target=7)), "no place"),
        (_signature(lambda s: s["leaves"][0].update(shape=["s9", 4])), "size is damaged"),
        (_signature(lambda s: s.update(takes=None)), "signature.json"),
        (_signature(lambda s: s["takes"].update(kind="registered", name="os.system", context="0")), "not registered"),
        (_signature(lambda s: s["weights"]["0.weight"].update(shape=[1 << 40, 4])), "behind its memory"),
        (_signature(lambda s: s["weights"]["0.weight"].update(stride=[1 << 40, 1])), "behind its memory"),
        (_signature(lambda s: s["weights"].update({"forward": s["weights"]["0.weight"]})), "signature.json"),
        (_header(lambda h: h["0.weight"].update(shape=[1 << 40, 4])), "weights.safetensors"),
        (_header(lambda h: h["0.weight"].update(data_offsets=[0, 1 << 50])), "weights.safetensors"),
        (_header(lambda h: h["0.weight"].update(dtype="F99")), "weights.safetensors"),
    ],
)
def test_a_part_that_lies_is_refused(change, message):
    with pytest.raises(fusewright.ProgramFileError, match=message):
        fusewright.load(rebuilt(change))


class Held:
    def __init__(self, x):
        self.x, self.dtype, self.device, self.kind = x, x.dtype, x.device, Held


class Trap:
    def __init__(self):
        raise AssertionError("loading a file runs nothing")

    __setstate__ = __init__


def object_file(edit=lambda made: None):
    """A program that returns an object, with its container changed."""
    data = written(fusewright.export(Held, (torch.ones(2),)))
    return rebuilt(_signature(lambda s: edit(s["gives"])), good=data)


def test_an_object_is_loaded_where_its_class_is_declared_safe():
    with pytest.raises(fusewright.ProgramFileError, match=r"add_safe_globals"):
        fusewright.load(object_file())
    with torch.serialization.safe_globals([Held]):
        loaded = fusewright.load(object_file())
        file = io.BytesIO()
        fusewright.package(loaded, file)
        for run in (loaded.module(), fusewright.load_package(file.getvalue())):
            made = run(torch.zeros(2))
            assert type(made) is Held and made.kind is Held and made.dtype is torch.float32
            assert made.device == torch.device("cpu") and torch.equal(made.x, torch.zeros(2))


@pytest.mark.parametrize(
    "edit",
    [
        lambda made: made.update(name="os.system"),
        lambda made: made.update(name="subprocess.Popen"),
        lambda made: made.update(name=f"{__name__}.Trap", keys=[], items=[]),
        lambda made: made.update(name=["Held"]),
        lambda made: made.update(keys=["x"]),
        lambda made: made.update(keys=["x", "x", "x", "x"]),
        lambda made: made.update(keys=[1, 2, 3, 4]),
        lambda made: made.pop("keys"),
        lambda made: made["items"][1].update(name="nn"),
        lambda made: made["items"][1].update(kind="device", name="nowhere"),
        lambda made: made["items"][1].update(items=[None]),
        lambda made: made["items"][3].update(name="os.system"),
        lambda made: made["items"][3].update(kind="object", items=[None] * 3),
    ],
)
def test_an_object_that_lies_is_refused(edit):
    with torch.serialization.safe_globals([Held]), pytest.raises(fusewright.ProgramFileError, match=r"signature\.json"):
        fusewright.load(object_file(edit))


def test_what_cannot_be_saved_is_an_error():
    program = fusewright.export(mlp(), (torch.randn(2, 4),))
    program.state["0.weight"] = program.state["0.weight"].to_sparse()
    with pytest.raises(fusewright.ExportError, match=r"0\.weight"):
        written(program)
    assert not os.path.exists("0.weight")


def timed(x):
    start = time.perf_counter()
    return x + 1, x.sum() * 0 + (time.perf_counter() - start)


def drawn(x):
    return x * random.random()


def cumulated(x):
    return torch.from_numpy(np.cumsum(x.numpy())) + 1


OWN_FRESH = """
import random, sys, torch, fusewright
x = torch.load(sys.argv[1])
for path in sys.argv[2:]:
    random.seed(3)
    run = fusewright.load_package(path) if path.endswith("fwp") else fusewright.load(path).module()
    torch.save(run(x), path + ".out")
"""


@pytest.mark.parametrize("ending", ["fw", "fwp"])
def test_a_fresh_process_knows_the_operators_of_this_library(ending, tmp_path):
    """Clocks, draws of Python's generator and NumPy's functions are operators of fusewright's own, which a process has
    registered when it captures."""
    x = torch.rand(12)
    torch.save(x, tmp_path / "in")
    paths = []
    for function in (timed, drawn, cumulated):
        with torch.no_grad():
            program = fusewright.export(function, (x,))
        paths.append(str(tmp_path / f"{function.__name__}.{ending}"))
        (fusewright.save if ending == "fw" else fusewright.package)(program, paths[-1])
    done = subprocess.run([sys.executable, "-c", OWN_FRESH, str(tmp_path / "in"), *paths], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    (moved, passed), scaled, summed = (torch.load(path + ".out") for path in paths)
    assert torch.equal(moved, x + 1) and 0 <= passed < 60
    random.seed(3)
    torch.testing.assert_close(scaled, drawn(x))
    torch.testing.assert_close(summed, cumulated(x))


def test_every_own_operator_of_a_program_is_registered_by_a_load():
    """Beside what no file holds: kernels of a process, and marks of devices."""
    folder = Path(operators.__path__[0])
    registers = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")
                 if 'Library("fusewright"' in path.read_text()}  # fmt: skip
    assert registers == {*artifact.OWN_OPERATORS, "user_kernels", "spmd"}


def test_a_file_names_no_other_function_of_time():
    with pytest.raises(ValueError, match="is no clock"):
        torch.ops.fusewright.clock("tzset", [])
