"""An image classifier of timm: compiled for inference, and compared with eager."""

import timm
import torch

import fusewright

torch.manual_seed(0)
model = timm.create_model("resnet18", pretrained=False, num_classes=10).eval()  # random weights
compiled = fusewright.compile(model)
with torch.inference_mode():
    for batch in (1, 4):
        images = torch.randn(batch, 3, 64, 64)
        logits = compiled(images)
        torch.testing.assert_close(logits, model(images), rtol=1e-3, atol=1e-3)
        print(f"batch of {batch}: classes {logits.argmax(1).tolist()}")
