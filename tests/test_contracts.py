"""The design's "never" list, checked on the source text (import-linter checks the direction of imports)."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import fusewright

SOURCE = Path(__file__).parent.parent / "src" / "fusewright"
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_IMPORTS = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx.experimental",
    "torch.export",
    "torch._subclasses",
    "pickle",
)
PEER_BACKENDS = {
    "backends/inductor.py",
    "backends/cudagraphs.py",
    "backends/onnxrt.py",
    "backends/tracing.py",  # for backends that are written for torch.compile and ask for its surroundings
}
ONLY_IN = {
    "jax": ("backends/xla/",),
    "llvmlite": ("codegen/llvm/", "runtime/"),
    "triton": ("codegen/triton", "runtime/"),
}

MAKE_TENSORS = {f"torch.{made.__name__}" for made in _device_constructors()}


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


GENERATES_PYTHON = ("background.py", "capture/breaks/finish.py", "codegen/triton/compiler.py", "base/records.py")
"""These run Python text that fusewright itself has just generated (background.py: one constant), never anything read from a file."""


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_never(path: Path) -> None:
    name, tree = relative(path), ast.parse(path.read_text())
    found = []
    for imported in imports(tree):
        if name not in PEER_BACKENDS:
            found += [imported for bad in FORBIDDEN_IMPORTS if imported == bad or imported.startswith(bad + ".")]
        for package, places in ONLY_IN.items():
            if imported.split(".")[0] == package and not name.startswith(places):
                found.append(f"{imported} outside {places}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and name != "base/options.py":
            found.append(f"line {node.lineno}: os.{node.attr} outside base/options.py")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print" and not name.startswith("tools/"):
                found.append(f"line {node.lineno}: print outside tools/")
            if node.func.id in ("exec", "eval") and name not in GENERATES_PYTHON:
                found.append(f"line {node.lineno}: {node.func.id}")
        if isinstance(node, ast.ExceptHandler) and all(isinstance(item, ast.Pass) for item in node.body):
            if node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"):
                found.append(f"line {node.lineno}: swallowed exception")
    assert not found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_tensor_is_made_on_a_device_that_is_named(path: Path) -> None:
    """A program's default device (`torch.set_default_device("meta")`) is no place for a tensor of ours."""
    if relative(path) == "tools/commands.py":  # makes the arguments of a user's program
        return
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKE_TENSORS:
            if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not found


# They name functions of PyTorch's in programs and texts, or ask what stands under a name now.
LOOK_UP = ("tools/", "base/", "graph/bound_names.py", "codegen/triton/library.py", "backends/onnx_export.py", "exporting/onnx_programs.py")  # fmt: skip


@pytest.mark.parametrize("path", [path for path in FILES if not relative(path).startswith(LOOK_UP)], ids=relative)
def test_pytorchs_functions_are_those_of_the_import(path: Path) -> None:
    """A program may put others under their names: what we do ourselves does not call them (base/pytorch.py)."""
    tree = ast.parse(path.read_text())
    if not any(name == "torch" or name.startswith("torch.nn.functional") for name in imports(tree)):
        return
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("torch."):
            value = functools.reduce(lambda place, part: getattr(place, part, None), name.split(".")[1:], torch)
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
                if not name.startswith(("torch._C.", "torch.ops.", "torch.utils.", "torch.fx.", "torch.SymInt.")):
                    found.append(f"line {node.lineno}: {name} of `import torch`")
    assert not found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 800
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_every_break_code_is_in_the_catalogue() -> None:
    from fusewright.base.break_catalogue import BREAKS

    missing = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).split(".")[-1] in ("GraphBreak", "SkipFrame")
                and node.args
            ):
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value not in BREAKS:
                    missing.add(f"{first.value} ({relative(path)}:{node.lineno})")
    assert not missing


def test_importing_and_compiling_leave_pytorchs_compiler_out() -> None:
    program = """
import sys, torch, fusewright
f = fusewright.compile(lambda x, y: torch.relu(x + y) * 2)
x = torch.randn(16)
with torch.no_grad():
    assert torch.equal(f(x, x), torch.relu(x + x) * 2)
for name in ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes", "sympy"):
    assert name not in sys.modules, name
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.returncode == 0, done.stderr


def test_a_warm_first_call_imports_no_more_than_it_needs_and_is_not_walked(tmp_path: Path) -> None:
    """Each module costs a quarter of a millisecond; what they make costs the collector ten, if it walks over it."""
    program = """
import gc, sys, torch, fusewright
gc.collect()
walked = []
def watch(phase, info):
    if phase == "start" and info["generation"] < 2:
        walked.append(sum(len(gc.get_objects(g)) for g in range(info["generation"] + 1)))
gc.callbacks.append(watch)
frozen = gc.get_freeze_count()  # a few hundred of CPython 3.12's own
f = fusewright.compile(lambda x: torch.relu(x) * 2)
assert gc.isenabled() and gc.get_freeze_count() <= frozen
x = torch.randn(16)
assert torch.equal(f(x), torch.relu(x) * 2)
gc.collect(0)
print(max(walked) < 10_000, [name for name in sys.argv[1:] if f"fusewright.{name}" in sys.modules])
"""
    left_out = [
        "autograd.record", "capture.breaks.cutting", "capture.call.higher_order", "runtime.cuda_code", "runtime.cudagraphs",
        "runtime.training_graphs", "operators.subgraphs", "exporting", "tools.explain",
    ]  # fmt: skip
    command = [sys.executable, "-c", program, *left_out]
    environment = {"PYTHONPATH": str(SOURCE.parent), "FUSEWRIGHT_CACHE_DIR": str(tmp_path)}
    for _ in range(2):  # the first fills the cache
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "[]"]


def test_the_pythons_are_the_same_everywhere() -> None:
    root = SOURCE.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = [name for one in project["classifiers"] if (name := one.rpartition(" :: ")[2]).startswith("3.")]
    assert listed == ["3.11", "3.12", "3.13", "3.14"] and project["requires-python"] == ">=3.11,<3.15"
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    assert "python: [" + ", ".join(f'"{one}"' for one in listed) + "]" in workflow
    frames = (root / "csrc" / "frame_layout.h").read_text()
    assert "PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030F0000" in frames
    program = "import sys; sys.version_info = (3, 15, 0); import fusewright"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert "ImportError: fusewright runs on Python 3.11 to 3.14" in done.stderr


BY_NAME = {
    "exporting/torch_programs.py": "torch.export",  # the user asks for PyTorch's own program
    "operators/user_kernels.py": "triton.",  # reads the IR of the user's own kernels
}
"""What is imported by importlib though the contracts forbid the import: the reasons are here, since they do not see it."""


def test_importlib_goes_around_no_contract() -> None:
    found: dict[str, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
                name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                text = name.value if isinstance(name, ast.Constant) else ""
                if text.startswith((*FORBIDDEN_IMPORTS, "triton", "llvmlite")):
                    found[str(path.relative_to(SOURCE))] = text
    assert found == BY_NAME


def test_compile_does_not_ask_how_much_is_frozen_for_what_others_have_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer takes a walk through all of it."""
    asked: list[None] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(None) or 0)
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000)
    try:
        young = [[number] for number in range(50_000)]
        assert gc.get_count()[0] > 10_000 and fusewright.compile(lambda x: x + 1) and len(young) == 50_000
    finally:
        gc.set_threshold(*threshold)
    assert not asked
