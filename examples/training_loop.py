"""A training loop: model, loss and optimizer's step compiled; losses beside eager's."""

import copy

import torch
from torch import nn

import fusewright

torch.manual_seed(0)
x = torch.randn(256, 16)
labels = (x.sum(1) > 0).long()


def train(model, compile):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @compile
    def loss_of(x, labels):
        return nn.functional.cross_entropy(model(x), labels)

    step = compile(optimizer.step)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 2))
eager = train(copy.deepcopy(model), lambda f: f)
compiled = train(model, fusewright.compile)
print(f"loss: {compiled[0]:.4f} to {compiled[-1]:.4f}; eager's last: {eager[-1]:.4f}")
torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)
