"""Gradients of embeddings: rows are added in place, to what a tied weight has got elsewhere or to zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import fusewright
from fusewright.graph.passes.library import embedding_gradients
from tests.listening import stage_texts


class Tied(nn.Module):
    """Two embeddings and an output layer by one weight."""

    def __init__(self, padding: int | None, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding)
        self.layers, self.tied = layers, tied

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        x = self.embedding(first).tanh()
        if self.layers > 1:
            x = x + self.embedding(second).sigmoid().sum(1, keepdim=True)
        return functional.linear(x, self.embedding.weight).logsumexp(-1).sum() if self.tied else x.square().sum()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("padding", [None, 4])
def test_gradients_are_eagers(padding: int | None, layers: int, tied: bool) -> None:
    torch.manual_seed(0)
    net = Tied(padding, layers, tied)
    reference = copy.deepcopy(net)
    inputs = torch.randint(0, 11, (3, 5)), torch.tensor([[4, 0], [0, 4], [4, 4]])
    with stage_texts("backward operators") as texts:
        compiled = fusewright.compile(net, fullgraph=True)
        for _ in range(2):
            compiled(*inputs).backward()
    for _ in range(2):
        reference(*inputs).backward()
    torch.testing.assert_close(net.embedding.weight.grad, reference.embedding.weight.grad)
    assert texts[0].count("aten.index_add_") == layers and "embedding_dense_backward" not in texts[0]


@pytest.mark.parametrize("padding", [None, 4])
def test_halves_are_summed_in_the_rows_that_were_read(padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_gradients, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    weight = torch.randn(50, 6).bfloat16().requires_grad_()
    index = torch.tensor([[4, 0, 7], [7, 7, 49], [4, 1, 0], [3, 3, 7]])
    scale = torch.randn(4, 3, 6).bfloat16()
    program = lambda index, weight: (functional.embedding(index, weight, padding) * scale).sum()
    with stage_texts("backward operators") as texts:
        fusewright.compile(program, fullgraph=True)(index, weight).backward()
    found, weight.grad = weight.grad, None
    program(index, weight).backward()
    assert "embedding_dense_backward" not in texts[0] and "float32[12, 6]" in texts[0]
    exact = torch.zeros(50, 6).index_add_(0, index.flatten(), scale.flatten(0, 1).float())
    if padding is not None:
        exact[padding] = 0
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(found, weight.grad, rtol=2e-2, atol=2e-2)


def test_a_gradient_that_is_read_before_it_is_added_to_stays() -> None:
    weight = torch.randn(7, 4, requires_grad=True)
    index = torch.tensor([1, 1, 6])

    def program(weight: torch.Tensor) -> torch.Tensor:
        doubled = weight * 2
        doubled.register_hook(lambda gradient: gradient + gradient.sum())
        return (
            functional.embedding(index, doubled).square().sum()
            + (doubled**3).sum()
            + functional.embedding(index, weight).sum()
        )

    results = []
    for run in (fusewright.compile(program), program):
        weight.grad = None
        run(weight).backward()
        results.append(weight.grad)
    torch.testing.assert_close(*results)


def test_a_view_of_another_gradient_is_not_written_to() -> None:
    """The matrix that the embedding's gradient is added to is another tensor's gradient as well, in another shape."""
    flat, index = torch.randn(28, requires_grad=True), torch.tensor([0, 3, 3])

    def program(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = flat.exp().view(7, 4)
        return functional.embedding(index, matrix).sum() + (matrix @ matrix.t()).sum(), matrix

    results = []
    for run in (fusewright.compile(program), program):
        loss, matrix = run(flat)
        results.append(torch.autograd.grad(loss + (matrix * 3).sum(), (flat, matrix), allow_unused=True)[0])
    torch.testing.assert_close(*results)
