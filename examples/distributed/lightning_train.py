"""Lightning on several processes. torchrun --nproc-per-node 2 examples/distributed/lightning_train.py ddp|fsdp2"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fusewright


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
        self.losses = []

    def configure_model(self):
        self.network = fusewright.compile(self.network)
        if sys.argv[1] == "fsdp2":
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        x, labels = batch
        loss = nn.functional.cross_entropy(self.network(x), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
x = torch.randn(256, 16)
model = Classifier()
on_gpus = torch.cuda.device_count() > 1
backend = "nccl" if on_gpus else "gloo"
if sys.argv[1] == "fsdp2":
    strategy = ModelParallelStrategy(process_group_backend=backend)
else:
    strategy = DDPStrategy(process_group_backend=backend)
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="gpu" if on_gpus else "cpu",
    devices=2,
    strategy=strategy,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32))
if trainer.is_global_zero:
    print(f"{sys.argv[1]} on {trainer.world_size}: loss {model.losses[0]:.4f} to {model.losses[-1]:.4f}")
assert model.losses[-1] < model.losses[0]
assert (sys.argv[1] == "fsdp2") == isinstance(next(model.parameters()), DTensor)
