"""accelerate on several processes. torchrun --nproc-per-node 2 examples/distributed/accelerate_train.py ddp|fsdp2"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fusewright

if sys.argv[1] == "fsdp2" and not torch.cuda.is_available():
    sys.exit("accelerate shards models on GPUs only")
torch.manual_seed(0)
x = torch.randn(256, 16)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32)
model = fusewright.compile(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sys.argv[1] == "fsdp2" else None
accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for _ in range(4):
    for inputs, labels in data:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
accelerator.print(f"{sys.argv[1]} on {accelerator.num_processes}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
assert losses[-1] < losses[0]
assert (sys.argv[1] == "fsdp2") == isinstance(next(model.parameters()), DTensor)
accelerator.end_training()
