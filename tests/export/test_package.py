"""`package` and `load_package`: what is called is the program, by machine code from the file, whatever the file is."""

from __future__ import annotations

import copy
import io
import json
import random
import subprocess
import sys
import zipfile

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fusewright
from fusewright import Dim
from fusewright.exporting import packaged
from fusewright.runtime import host
from tests.export.test_export import MODELS, assert_same, mlp
from tests.export.test_save import exported


def written(programs, **arguments) -> bytes:
    file = io.BytesIO()
    fusewright.package(programs, file, **arguments)
    return file.getvalue()


@pytest.fixture
def compiled_only(monkeypatch):
    """No call runs operator by operator."""

    def fails(self, *args, **kwargs):
        raise AssertionError("a call ran operator by operator")

    monkeypatch.setattr(packaged.EntryPoint, "by_operators", fails)


@pytest.mark.parametrize("name", MODELS)
def test_a_package_gives_what_eager_gives(name, compiled_only, tmp_path):
    model, program = exported(name)
    arguments, least = MODELS[name][1], MODELS[name][3]
    path = tmp_path / "model.fwp"
    fusewright.package(program, path)
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        package, eager = fusewright.load_package(source), copy.deepcopy(model)
        for size in (least, 64, 3):
            args = arguments(size)
            theirs = copy.deepcopy(args)
            with torch.no_grad():
                assert_same(package(*args), eager(*theirs))
            assert_same(args, theirs)
            assert_same(dict(package.programs["forward"].module().named_buffers()), dict(eager.named_buffers()))
    module = program.module()
    for wrong in (arguments(300), (torch.zeros(2, 99, 3),), ("x",), (*arguments(3), 1)):
        with pytest.raises(fusewright.ProgramInputError) as expected:
            module(*wrong)
        with pytest.raises(fusewright.ProgramInputError) as found:
            package(*wrong)
        assert str(found.value) == str(expected.value)


FRESH = """
import sys, torch, fusewright
package = fusewright.load_package(sys.argv[1])
x = torch.load(sys.argv[2], weights_only=True)
torch.save([package(one) for one in x], sys.argv[3])
stages = "capture graph.passes loops schedule select autograd record codegen.llvm codegen.call_plan backends compiler"
for name in sorted(sys.modules):
    if name.startswith(("llvmlite", *(f"fusewright.{stage}" for stage in stages.split()))):
        if name not in ("fusewright.capture", "fusewright.codegen.call_plan_types") and "capture.guards" not in name:
            print(name)
"""


def test_a_load_imports_no_compiler(tmp_path):
    """In a fresh process: neither capture (but for the guards, which calls are checked by), nor any later stage."""
    model, program = exported()
    paths = [str(tmp_path / name) for name in ("model.fwp", "in", "out")]
    fusewright.package(program, paths[0], targets=("x86-64-v3", "native", "aarch64"))
    inputs = [torch.randn(size, 4) for size in (1, 64)]
    torch.save(inputs, paths[1])
    done = subprocess.run([sys.executable, "-c", FRESH, *paths], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    for found, x in zip(torch.load(paths[2], weights_only=True), inputs, strict=True):
        torch.testing.assert_close(found, model(x).detach())


class Nested(torch.nn.Module):
    """Arguments and results in containers; results that are arguments, weights and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, pair, *, options=None, scale=2):
        y = self.inner(x) * scale + pair[0] - pair[1]["z"]
        more = y if options is None else y * options
        return {"y": more, "again": (x, self.inner.weight, 3, [more.sum(0), x.shape[0]], None)}, more.t()


def nested_arguments(size):
    return (torch.randn(size, 4), [torch.randn(size, 4), {"z": torch.randn(4)}]), {
        "options": torch.randn(4),
        "scale": 3,
    }


def test_containers_of_arguments_and_results(compiled_only):
    model = Nested().eval()
    args, kwargs = nested_arguments(2)
    batch = Dim("batch", min=2, max=50)
    shapes = {"x": {0: batch}, "pair": [{0: batch}, {"z": None}], "options": None, "scale": None}
    package = fusewright.load_package(written(fusewright.export(model, args, kwargs, dynamic_shapes=shapes)))
    for size in (2, 5, 50):
        args, kwargs = nested_arguments(size)
        (found, turned), (expected, other) = package(*args, **kwargs), model(*args, **kwargs)
        assert found["again"][0] is args[0]
        assert_same((found, turned), (expected, other))
        assert_same(package(*args, **dict(reversed(kwargs.items())))[0], expected)
    with pytest.raises(fusewright.ProgramInputError, match="a fixed value"):
        package(*args, **{**kwargs, "scale": 4})
    with pytest.raises(fusewright.ProgramInputError, match="exported for arguments"):
        package(args[0])


class Related(torch.nn.Module):
    """Sizes that follow from others; a program that asks about them; memory in another order."""

    def forward(self, x, y):
        return torch.cat([x, y.transpose(1, 2)]).mean(0) if y.shape[0] > 4 else None


def test_sizes_that_follow_from_others_and_layouts(compiled_only):
    batch, width = Dim("batch", min=3, max=40), Dim("width", max=9)
    example = torch.randn(3, 2, 5), torch.randn(6, 2, 5).transpose(1, 2)
    shapes = {"x": {0: batch, 2: width}, "y": {0: 2 * batch, 1: width}}
    model = Related()
    package = fusewright.load_package(written(fusewright.export(model, example, dynamic_shapes=shapes)))
    for size, wide in ((3, 5), (40, 1), (7, 9)):
        x, y = torch.randn(size, 2, wide), torch.randn(2 * size, 2, wide).transpose(1, 2)
        for given in ((x, y), (x, y.contiguous()), (x.transpose(0, 2).contiguous().transpose(0, 2), y)):
            torch.testing.assert_close(package(*given), model(*given))
    for x, y in ((torch.randn(3, 2, 5), torch.randn(7, 5, 2)), (torch.randn(3, 2, 5), torch.randn(6, 4, 2))):
        with pytest.raises(fusewright.ProgramInputError, match="holds for"):
            package(x, y)


class Writes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, cache, x):
        self.seen.add_(x.sum(0))
        cache.copy_(cache.roll(1, 0) + x * self.seen)
        return cache[:2] + x.mean()


@pytest.mark.parametrize(
    "form", ["apart", "the same tensor", "overlapping", "the buffer", "another layout", "parameter"]
)
def test_what_is_written_to_may_share_memory(form):
    """A program that writes does what the exported program's module does, wherever its arguments lie."""
    program = fusewright.export(Writes(), (torch.randn(6, 4), torch.randn(6, 4)))
    package = fusewright.load_package(written(program))
    answers = []
    for run, state in ((package, package.state_dict()), (program.module(), program.state)):
        torch.manual_seed(0)
        memory = torch.randn(8, 8)
        cache, x = memory[:6, :4].contiguous(), torch.randn(6, 4)
        if form == "the same tensor":
            x = cache
        elif form == "overlapping":
            cache, x = memory.reshape(-1)[:24].view(6, 4), memory.reshape(-1)[4:28].view(6, 4)
        elif form == "the buffer":
            x = state["seen"].expand(6, 4)
        elif form == "another layout":
            cache = memory[:4, :6].t()
        elif form == "parameter":
            cache = torch.nn.Parameter(cache, requires_grad=False)
        answers.append((run(cache, x).clone(), cache.clone(), state["seen"].clone(), memory))
    assert_same(answers[0], answers[1])


@pytest.mark.parametrize(
    "around", ["functional", "fake", "eager", "inference", "autocast", "grad", "subclass", "index"]
)
def test_calls_that_no_code_is_for(around):
    """Transforms, modes, tensors of other kinds, indices out of range: what operators do, or what code does."""

    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 4)

        def forward(self, x, at):
            return (x + self.table(at)).tanh() @ x.t()

    model = Lookup().eval()
    x, at = torch.randn(3, 4), torch.tensor([0, 4, 2])
    package = fusewright.load_package(written(fusewright.export(model, (x, at))))
    expected = model(x, at).detach()
    if around == "functional":
        wide = x.expand(2, 3, 4)
        torch.testing.assert_close(torch.func.vmap(package, (0, None))(wide, at), expected.expand(2, 3, 3))
    elif around == "fake":
        with FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(package(x, at), expected)
        assert counter.get_total_flops() > 0
    elif around == "eager":
        with fusewright.set_stance("force_eager"):
            torch.testing.assert_close(package(x, at), expected)
    elif around == "inference":
        with torch.inference_mode():
            torch.testing.assert_close(package(x, at), expected)
        torch.testing.assert_close(package(x, at), expected)
    elif around == "autocast":
        with torch.autocast("cpu"):
            assert package(x, at).dtype is package(x.t().contiguous().t(), at).dtype is torch.float32
    elif around == "grad":
        found = package(x.clone().requires_grad_(), at)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(package(torch.nn.Parameter(x), at), expected)
    elif around == "subclass":
        own = x.as_subclass(type("Own", (torch.Tensor,), {}))
        torch.testing.assert_close(torch.Tensor(package(own, at)), expected)
    else:
        with pytest.raises(IndexError):
            package(x, torch.tensor([0, 5, 2]))


# --- targets ---------------------------------------------------------------------------------------------------------

TARGETS = ("native", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64")


@pytest.fixture(scope="module")
def for_all():
    model, program = exported("images")
    return model, written(program, targets=TARGETS)


@pytest.mark.skipif(host.platform.machine() != "x86_64", reason="its targets are x86-64's")
@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "native", "again"])
def test_the_best_target_that_runs_here_is_taken(target, for_all, monkeypatch):
    model, data = for_all
    has = {"again": (), "native": host.cpu_flags()}.get(target) or host.needs(target)[1] * (target != "again")
    runs = target == "again" or host.runs_here(*host.needs(target))
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(has))
    if not runs:  # such a machine would choose it
        manifest = json.loads(zipfile.ZipFile(io.BytesIO(data)).read("package.json"))
        assert packaged._chosen(manifest["targets"], packaged.made_with(), None) == target
        return
    package = fusewright.load_package(data)
    assert package.target == ("native" if target == "again" else target)
    for size in (1, 5):
        x = torch.randn(size, 3, 8, 8)
        torch.testing.assert_close(package(x), model(x).detach())


def test_code_of_another_processor_is_never_loaded(for_all, monkeypatch):
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset())
    for target in TARGETS[:4]:
        with pytest.raises(fusewright.ExportError, match="does not run on this machine"):
            fusewright.load_package(for_all[1], target=target)
    with pytest.raises(fusewright.ExportError, match="no code for 'x87'"):
        fusewright.load_package(for_all[1], target="x87")


@pytest.mark.parametrize("why", ["processor", "PyTorch"])
def test_without_code_that_runs_here_it_is_compiled_again(why, monkeypatch):
    model, program = exported()
    data = written(program, targets=("aarch64",) if host.platform.machine() == "x86_64" else ("x86-64-v2",))
    if why == "PyTorch":
        data = written(program)
        monkeypatch.setattr(packaged, "made_with", lambda: {"torch": "1.0", "plan": 0})
    x = torch.randn(1, 4), torch.randn(9, 4)
    package = fusewright.load_package(data)
    for one in x:
        torch.testing.assert_close(package(one), model(one).detach())
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fusewright.ExportError, match=r"no code in the package runs on this machine.*llvmlite"):
        fusewright.load_package(data)


# --- several programs ------------------------------------------------------------------------------------------------


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(32, 256), torch.nn.Linear(256, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens).cumsum(1))


class Decode(torch.nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, token, total):
        total.add_(self.model.table(token))
        return self.model.head(total)


def prefill_and_decode():
    model = Language().eval()
    length = Dim("length", max=64)
    prefill = fusewright.export(model, (torch.zeros(1, 3, dtype=torch.long),), dynamic_shapes=({1: length},))
    decode = fusewright.export(Decode(model).eval(), (torch.zeros(1, dtype=torch.long), torch.zeros(1, 256)))
    return model, {"prefill": prefill, "decode": decode}


def test_programs_share_their_weights(compiled_only):
    model, programs = prefill_and_decode()
    data = written(programs)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.getinfo("weights.safetensors").file_size < 1.2 * 32 * 256 * 4
    package = fusewright.load_package(data)
    with pytest.raises(TypeError):
        package(1)
    states = [program.state for program in package.programs.values()]
    assert states[0]["table.weight"] is states[0]["head.weight"] is states[1]["model.head.weight"]
    tokens = torch.randint(32, (1, 20))
    torch.testing.assert_close(package.prefill(tokens), model(tokens).detach())
    state = {name: torch.randn_like(value) for name, value in package.state_dict().items()}
    state = dict.fromkeys(state, next(iter(state.values())))  # they are tied
    package.load_state_dict(state)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    total = torch.zeros(1, 256)
    for at in range(20):
        last = package.decode(tokens[:, at], total)
    torch.testing.assert_close(last, model(tokens)[:, -1].detach(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(package.prefill(tokens), model(tokens).detach(), rtol=1e-4, atol=1e-3)


def test_weights_that_do_not_fit_change_nothing():
    model, program = exported()
    package = fusewright.load_package(written(program))
    state = package.state_dict()
    for wrong in (
        {},
        {**state, "more": torch.ones(1)},
        {**state, "2.bias": torch.ones(3)},
        {**state, "2.bias": torch.ones(10).double()},
    ):
        with pytest.raises(fusewright.ProgramInputError):
            package.load_state_dict(wrong)
    x = torch.randn(5, 4)
    torch.testing.assert_close(package(x), model(x).detach())
    package.programs["forward"].state["0.weight"].data = torch.randn(8, 4).double()  # no code is for such a weight
    with pytest.raises(RuntimeError, match="dtype"):
        package(x)


def elsewhere(program):
    program.state["0.weight"] = torch.nn.Parameter(program.state["0.weight"].to("meta"))
    return program


@pytest.mark.parametrize("program, message", [
    (lambda: elsewhere(exported()[1]), "packages hold code for CPUs"),
    (lambda: {"call me": exported()[1]}, "identifiers"),
    (lambda: {"state_dict": exported()[1]}, "identifiers"),
    (lambda: mlp(), "exported programs"),
    (dict, "at least one"),
])  # fmt: skip
def test_what_cannot_be_packaged_is_an_error(program, message):
    with pytest.raises(fusewright.FusewrightError, match=message):
        written(program())
    with pytest.raises(fusewright.OptionError, match="unknown target"):
        written(exported()[1], targets=("x86-64-v5",))


# --- hostile files ---------------------------------------------------------------------------------------------------

_kept: dict[str, bytes] = {}


def good() -> bytes:
    if not _kept:
        _kept["package"] = written(exported()[1])
    return _kept["package"]


def rebuilt(change) -> bytes:
    """The good file with parts changed; hashes stay as they were."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good())) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            for one, data in change(name, old.read(name)):
                new.writestr(one, data)
    return file.getvalue()


def manifest(edit):
    def change(name, data):
        if name == "package.json":
            value = json.loads(data)
            edit(value)
            data = json.dumps(value).encode()
        return [(name, data)]

    return change


def part(wanted, edit):
    return lambda name, data: [(name, edit(data) if name == wanted else data)]


@pytest.fixture
def nothing_runs(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("code was loaded")

    monkeypatch.setattr(packaged, "load_with_code", fails)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "change, message",
    [
        (part("forward/0.code", lambda data: data[:-1] + bytes([data[-1] ^ 1])), "0.code: its hash differs"),
        (part("forward/0.code", lambda data: data[:-9]), "0.code: its hash differs"),
        (part("forward/graph.txt", lambda data: data.replace(b"relu", b"tanh")), "graph.txt: its hash differs"),
        (part("forward/signature.json", lambda data: data + b" "), "signature.json: its hash differs"),
        (lambda name, data: [] if name == "forward/0.code" else [(name, data)], "0.code: is missing"),
        (lambda name, data: [] if name == "package.json" else [(name, data)], "no package"),
        (lambda name, data: [(name, data)] * 2, "two parts"),
        (lambda name, data: [(name, data), ("forward/9.code", data)], "two parts|has no hash"),
        (lambda name, data: [(name, data), ("../../evil.code", data)], "unknown part"),
        (lambda name, data: [(name, data), ("forward/evil.pkl", data)], "unknown part"),
        (manifest(lambda m: m.update(format=9)), "format 9"),
        (manifest(lambda m: m.pop("hashes")), "package.json"),
        (manifest(lambda m: m["hashes"].pop("forward/0.code")), "has no hash"),
        (manifest(lambda m: m.pop("targets")), "package.json"),
        (manifest(lambda m: m["targets"].update({"x": {"machine": 1, "flags": []}})), "target 'x' is damaged"),
        (manifest(lambda m: m["programs"].update({"../x": {}})), "no name"),
        (manifest(lambda m: m["programs"].update({"other": {}})), "other/graph.txt: is missing"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0].update(part="package.json")), "no part"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0]["inputs"].pop()), "inputs do not fit"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0]["inputs"][1].__setitem__(1, 7)), "input of a plan"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0]["inputs"].reverse()), "input of a plan"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0]["results"][0].__setitem__(1, 7)), "result of a plan"),
        (manifest(lambda m: m["programs"]["forward"]["versions"][0]["facts"][0].__setitem__(2, "9.9")), "condition"),
    ],
)  # fmt: skip
def test_a_package_that_lies_is_refused(change, message, nothing_runs):
    with pytest.raises(fusewright.ProgramFileError, match=message):
        fusewright.load_package(rebuilt(change))


@pytest.mark.parametrize("seed", range(100))
def test_random_damage_runs_nothing(seed, monkeypatch):
    draw = random.Random(seed)
    data = bytearray(good())
    if seed % 4 == 0:
        del data[draw.randrange(len(data)) :]
    for _ in range(draw.randrange(1, 4)):
        if data and seed % 4:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    loaded: list[bytes] = []
    monkeypatch.setattr(packaged, "load_with_code", lambda plan, code: loaded.append(code) or (lambda *inputs: ()))
    try:
        fusewright.load_package(bytes(data))
    except fusewright.ProgramFileError:
        assert not loaded
        return
    with zipfile.ZipFile(io.BytesIO(good())) as archive:
        assert loaded and all(
            archive.read("forward/0.code").find(code) >= 0 or code in archive.read("forward/1.code") for code in loaded
        )


def test_signatures():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key, other = ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate()
    model, program = exported()
    signed, x = written(program, sign_key=key), torch.randn(3, 4)
    raw = key.public_key().public_bytes_raw()
    for verify in (None, key.public_key(), raw):
        torch.testing.assert_close(fusewright.load_package(signed, verify_key=verify)(x), model(x).detach())
    assert written(program, sign_key=key.private_bytes_raw()) != written(program)
    with pytest.raises(fusewright.ProgramFileError, match="not signed by this key"):
        fusewright.load_package(signed, verify_key=other.public_key())
    with pytest.raises(fusewright.ProgramFileError, match="is not signed"):
        fusewright.load_package(good(), verify_key=raw)
    with pytest.raises(fusewright.ExportError, match="no Ed25519 key"):
        fusewright.load_package(signed, verify_key=b"short")
    # A manifest with the right hash of another code, and weights that were exchanged with a valid checksum.
    _kept["package"] = signed
    try:
        for change, message in (
            (manifest(lambda m: m["hashes"].update({"forward/0.code": "0" * 64})), "not signed by this key"),
            (part("weights.safetensors", lambda data: data[:-70] + bytes(70)), "weights.safetensors: its hash differs"),
        ):
            with pytest.raises(fusewright.ProgramFileError, match=message):
                fusewright.load_package(rebuilt(change), verify_key=raw)
    finally:
        _kept.clear()
