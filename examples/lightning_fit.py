"""Lightning: a module whose network is compiled; Trainer and callbacks stay as they are."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusewright


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
        self.network = fusewright.compile(network)
        self.losses = []

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
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64))
print(f"loss: {model.losses[0]:.4f} to {model.losses[-1]:.4f} in {len(model.losses)} steps")
assert model.losses[-1] < model.losses[0]
