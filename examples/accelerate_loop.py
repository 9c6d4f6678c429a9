"""accelerate: `prepare` gets the compiled model; the loop stays as it is."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusewright

torch.manual_seed(0)
x = torch.randn(256, 16)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64)
model = fusewright.compile(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for _ in range(4):
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
print(f"loss: {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")
assert losses[-1] < losses[0]
