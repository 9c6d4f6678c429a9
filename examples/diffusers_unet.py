"""Image generation with diffusers: the UNet of a pipeline compiled, the scheduler left eager."""

import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

import fusewright

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).eval()
pipeline = DDIMPipeline(unet=unet, scheduler=DDIMScheduler())  # random weights
pipeline.set_progress_bar_config(disable=True)


def images():
    return pipeline(generator=torch.Generator().manual_seed(1), num_inference_steps=4, output_type="np").images


eager = torch.from_numpy(images())
fusewright.compile_(pipeline.unet)  # in place: the pipeline keeps its module
compiled = torch.from_numpy(images())
print("image:", tuple(compiled.shape), "largest difference:", f"{(compiled - eager).abs().max():.1e}")
torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)
