"""DDP by Ray Train, which starts the processes itself. python examples/distributed/ray_train.py ddp"""

import sys
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import fusewright


def train(config: dict[str, Any]) -> None:
    """Runs in every process; Ray wraps the compiled model."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    model = fusewright.compile(layers, fullgraph=True)
    model = ray.train.torch.prepare_model(model)
    place = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(ray.train.get_context().get_world_rank())
    for _ in range(config["steps"]):
        x = torch.randn(32, 16, generator=generator).to(place)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item()})
    if ray.train.get_context().get_world_rank() == 0:  # Ray shows what its processes print
        print(f"ddp on {ray.train.get_context().get_world_size()}: loss {loss.item():.3f}")


if sys.argv[1:] != ["ddp"]:
    sys.exit("usage: ray_train.py ddp")
processes = max(2, torch.cuda.device_count())
scaling = ScalingConfig(num_workers=processes, use_gpu=torch.cuda.is_available())
TorchTrainer(train, train_loop_config={"steps": 32}, scaling_config=scaling).fit()
