"""`fusewright.patch`: programs and libraries that call torch.compile get fusewright, and PyTorch's own afterwards."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import _native
from fusewright.base import events, options
from fusewright.base.errors import warn_once
from fusewright.module import CompiledModuleBase, ModuleCaller
from fusewright.tools import cli, patching

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The functions that fusewright compiles, while torch.compile is replaced."""
    seen: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Compiled):
            seen.append(event.function)

    with events.STREAM.listening(listen), fusewright.patch():
        yield seen


def test_all_is_undone() -> None:
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in patching.REPLACED]
    there = [(owner, name, ours) for owner, name, ours in patching.REPLACED if name in vars(owner)]
    with fusewright.patch() as outer:
        inner = fusewright.patch()
        assert all(vars(owner)[name] is ours for owner, name, ours in there)
        inner.undo()
        inner.undo()
        assert torch.compile is patching._compile
        outer.undo()
        assert torch.compile is not patching._compile
    assert [(owner, name, vars(owner).get(name)) for owner, name, _ in patching.REPLACED] == before

    @fusewright.patch()
    def decorated() -> Any:
        return torch.compile

    assert torch.compile is not patching._compile
    assert decorated() is patching._compile and torch.compile is not patching._compile


def test_compile_in_all_its_forms(compiled: list[str]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1

    x = torch.randn(4)
    decorated = torch.compile(fullgraph=True, dynamic=False)(f)
    forms = [torch.compile(f), decorated, torch.compile(f, backend="inductor"), torch.compile(f, backend="fusewright")]
    forms += [torch.compile(f, mode="reduce-overhead"), torch.compiler.compile(f), torch.compile(f, backend="eager")]
    for form in forms:
        assert isinstance(form, _native.CompiledFunction)
        assert torch.equal(form(x), f(x))
    assert len(compiled) == len(forms)
    assert torch.compile(f, disable=True) is f


def test_modules(compiled: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    twin = torch.compile(net)
    assert (
        isinstance(twin, CompiledModuleBase)
        and twin._orig_mod is net
        and list(twin.state_dict()) == list(net.state_dict())
    )
    x = torch.randn(2, 3)
    expected = net(x)
    torch.testing.assert_close(twin(x), expected)
    net.compile(fullgraph=True, backend="inductor")
    assert isinstance(net._compiled_call_impl, ModuleCaller)
    torch.testing.assert_close(net(x), expected)
    assert len(compiled) == 2


def test_other_compilers_options_are_left_out_with_a_warning(compiled: list[str]) -> None:
    warn_once.cache_clear()
    with pytest.warns(fusewright.OptionWarning, match="coordinate_descent_tuning, epilogue_fusion"):
        f = torch.compile(
            lambda x: x + 1,
            options={"epilogue_fusion": True, "coordinate_descent_tuning": 1, "max_autotune": False},
        )
    assert torch.equal(f(torch.zeros(2)), torch.ones(2)) and len(compiled) == 1
    got: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], options: Any = None) -> Any:
        got.append(options)
        return gm.forward

    torch.compile(lambda x: x * 2, backend=backend, options={"epilogue_fusion": 3})(torch.ones(2))
    assert got == [{"epilogue_fusion": 3}]


def test_settings_of_pytorchs_capture_count(compiled: list[str]) -> None:
    config = importlib.import_module("torch._dynamo.config")
    with config.patch(capture_dynamic_output_shape_ops=True):
        f = torch.compile(lambda x: x[x > 0] * 2, fullgraph=True)
    assert torch.equal(f(torch.tensor([1.0, -1.0, 2.0])), torch.tensor([2.0, 4.0]))


def test_names_of_torch_compiler(compiled: list[str]) -> None:
    assert "native" in torch.compiler.list_backends(None)
    calls: list[int] = []

    @torch.compiler.disable(reason="it counts")
    def count() -> None:
        calls.append(1)

    f = torch.compile(lambda x: (count(), x + 1)[1])
    f(torch.ones(2))
    f(torch.ones(2))
    assert len(calls) == 2
    with torch.compiler.set_stance("force_eager"):
        before = len(compiled)
        torch.compile(lambda x: x + 2)(torch.ones(2))
        assert len(compiled) == before
    torch.compiler.reset()


PROGRAM = """
import sys
import torch
assert "torch._dynamo" not in sys.modules
f = torch.compile(lambda x: x + 1)
assert torch.equal(f(torch.zeros(2)), torch.ones(2))
print(type(f).__module__, __name__, sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_run_a_script_as_a_command(script: Path) -> None:
    for command in (["run", str(script), "--a", "b"], ["run", "-m", "program", "--a", "b"]):
        done = subprocess.run(
            [sys.executable, "-m", "fusewright", *command],
            capture_output=True, text=True, cwd=script.parent, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin"},
        )  # fmt: skip
        assert done.stdout == "fusewright._native __main__ ['--a', 'b']\n", done.stderr


def test_run_keeps_a_programs_exit_status_and_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "replace_torch_compile", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = tmp_path / "p.py"
    program.write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit, match="7"):
        cli.main(["run", str(program)])
    program.write_text("raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        cli.main(["run", str(program)])
    assert torch.compile is not patching._compile
    assert cli.main(["run", str(tmp_path / "none.py")]) == 2


@pytest.mark.parametrize("wanted", ["1", "0", ""])
def test_the_variable_replaces_torch_compile_without_an_edit(script: Path, wanted: str) -> None:
    installed = (
        script.parent / "site" / "fusewright-0.dist-info"
    )  # the entry points of the project, as pip installs them
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: fusewright\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\nfusewright = fusewright_autoload:autoload\n")
    script.write_text("import torch, sys\nprint(torch.compile.__module__, 'fusewright' in sys.modules)")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": f"{installed.parent}:{ROOT / 'src'}",
            "FUSEWRIGHT_REPLACE_TORCH_COMPILE": wanted,
        },
    )
    expected = {"1": "fusewright.tools.patching True\n", "0": "torch True\n", "": "torch False\n"}[wanted]
    assert done.stdout == expected, done.stderr


def test_the_entry_point_is_in_the_project() -> None:
    assert 'fusewright = "fusewright_autoload:autoload"' in (ROOT / "pyproject.toml").read_text()


def test_transformers_generate(compiled: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **sizes)
    ).eval()
    ids = torch.randint(0, 50, (1, 5))
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    plain = torch.compile
    with pytest.MonkeyPatch.context() as eager:
        eager.setattr(torch, "compile", lambda model, **_: model)
        expected = model.generate(ids, **how)
    assert torch.compile is plain and not compiled
    config = transformers.CompileConfig()
    config._compile_all_devices = True  # it compiles on GPUs only, otherwise
    assert torch.equal(model.generate(ids, compile_config=config, **how), expected)
    assert compiled


def test_accelerate_prepares_a_compiled_model(compiled: list[str]) -> None:
    accelerate = pytest.importorskip("accelerate")
    net = nn.Linear(4, 4)
    accelerator = accelerate.Accelerator(dynamo_backend="inductor", cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    assert compiled and accelerator.unwrap_model(model) is not None
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


def test_trainer_of_transformers(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `torch_compile=True` it compiles the model; losses and weights are those of its training without."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # Where there is a GPU it sets a flag, which PyTorch's own test helpers forbid.
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: False)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(48).view(6, 8) % 7]

    def trained(**arguments: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, num_key_value_heads=2, **sizes))
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error"}
        how = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=3, logging_steps=1, learning_rate=1e-2,
            per_device_train_batch_size=2, max_grad_norm=1.0, **quiet, **arguments,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=how, train_dataset=rows)
        trainer.train()
        return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row], model.state_dict()

    expected = trained()
    assert not compiled and len(expected[0]) == 3
    torch.testing.assert_close(trained(torch_compile=True), expected, rtol=1e-3, atol=1e-4)
    assert compiled


@pytest.mark.parametrize("step", ["calls forward", "calls a part"])
def test_lightning_trains_a_compiled_module(step: str, compiled: list[str], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Learner(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = (self(batch) if step == "calls forward" else self.net(batch)).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(compile_: Any) -> torch.Tensor:
        torch.manual_seed(0)
        learner = Learner()
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about workers of data loaders
            trainer.fit(compile_(learner), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
        return learner.net.weight.detach()

    expected = trained(lambda learner: learner)
    assert not compiled
    torch.testing.assert_close(trained(torch.compile), expected)
    assert any("training_step" in name for name in compiled)


def test_diffusers_compiles_repeated_blocks(compiled: list[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    model = diffusers.DiTTransformer2DModel(**sizes, patch_size=2, norm_num_groups=1).eval()
    model._repeated_blocks = ["BasicTransformerBlock"]  # which its newer models name themselves
    x, t, label = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.tensor([1])
    with torch.no_grad():
        expected = model(x, timestep=t, class_labels=label).sample
        model.compile_repeated_blocks(fullgraph=True)
        torch.testing.assert_close(model(x, timestep=t, class_labels=label).sample, expected)
    assert compiled
