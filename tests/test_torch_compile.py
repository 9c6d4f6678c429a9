"""fusewright under PyTorch's own capture: torch.compile(model, backend="fusewright")."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base import events


@pytest.fixture
def captured() -> Iterator[list[events.Event]]:
    seen: list[events.Event] = []
    torch._dynamo.reset()
    with events.STREAM.listening(seen.append):
        yield seen
    torch._dynamo.reset()


def kinds(seen: list[events.Event]) -> list[str]:
    return [
        type(event).__name__
        for event in seen
        if isinstance(event, events.Captured | events.Broken | events.Skipped | events.FellBack)
    ]


@pytest.fixture
def backend() -> Any:
    """What the entry point that the project publishes leads to."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    value = project["project"]["entry-points"]["torch_dynamo_backends"]["fusewright"]
    return EntryPoint("fusewright", value, "torch_dynamo_backends").load()


def test_mlp_trains_and_sizes_become_symbolic(backend: Any, captured: list[events.Event]) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    reference = copy.deepcopy(net)
    compiled = torch.compile(net, backend=backend)
    for rows in (3, 5, 7, 9):
        x = torch.randn(rows, 8)
        compiled(x).square().sum().backward()
        reference(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])
    assert kinds(captured) == ["Captured", "Captured"]
    assert any(isinstance(event, events.KernelMade) for event in captured)


def test_bert_in_inference_and_training(backend: Any, captured: list[events.Event]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    ids, labels = torch.randint(0, 100, (2, 10)), torch.tensor([0, 1])
    got, expected = (m(input_ids=ids, labels=labels) for m in (compiled, reference))
    torch.testing.assert_close((got.loss, got.logits), (expected.loss, expected.logits))
    got.loss.backward()
    expected.loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        for length in (10, 12, 14):
            ids = torch.randint(0, 100, (2, length))
            torch.testing.assert_close(compiled(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert kinds(captured) == ["Captured"] * 3  # training, inference, inference with a symbolic length


def test_writes_views_several_outputs_and_options(backend: Any, captured: list[events.Event]) -> None:
    def f(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        y = x.view(-1, n).mul(2)
        x.add_(1)
        return y.sum(0), x.shape[0] * 2

    compiled = torch.compile(f, backend=backend, dynamic=True)
    for n in (2, 3, 4):
        mine, theirs = torch.arange(12.0), torch.arange(12.0)
        torch.testing.assert_close(compiled(mine, n), f(theirs, n))
        torch.testing.assert_close(mine, theirs)
    assert "FellBack" not in kinds(captured)
    tuned = torch.compile(lambda x: x + 1, backend=backend, options={"fusion": False})
    assert torch.equal(tuned(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(Exception, match="did you mean 'fusion'"):
        torch.compile(lambda x: x + 2, backend=backend, options={"fusio": False})(torch.ones(2))


def test_compiled_functions_are_called_from_torch_compile(captured: list[events.Event]) -> None:
    inner = fusewright.compile(lambda x: x.sin() * 2)

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x + 1) + 1

    x = torch.randn(3)
    for _ in range(2):
        torch.testing.assert_close(outer(x), (x + 1).sin() * 2 + 1)
    assert "InternalError" not in [type(event).__name__ for event in captured]
