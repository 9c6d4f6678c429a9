"""Programs over images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.libraries.table import Made, images, program


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10, **settings)


@program("timm")
def timm_vit() -> Made:
    return _timm("vit_tiny_patch16_224", img_size=64, depth=3).eval(), (images(),)


@program("timm")
def timm_swin() -> Made:
    return _timm("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1)).eval(), (images(56),)


@program("timm", training=True)
def timm_efficientnet_training() -> Made:
    return _timm("efficientnet_b0", drop_path_rate=0.0).train(), (images(),)


@program("timm", training=True)
def timm_convnext_training() -> Made:
    return _timm("convnext_atto").train(), (images(),)


@program("timm")
def timm_features() -> Made:
    import timm

    return timm.create_model("resnet18", features_only=True).eval(), (images(),)


@program("torchvision")
def torchvision_resnet() -> Made:
    from torchvision.models import resnet18

    return resnet18(weights=None).eval(), (images(),)


@program("torchvision", training=True)
def torchvision_mobilenet_training() -> Made:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(weights=None, dropout=0.0).train(), (images(),)


@program("torchvision")
def torchvision_segmentation() -> Made:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None).eval(), (images(),)


@program("torchvision")
def torchvision_ssdlite() -> Made:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval(), ([torch.rand(3, 96, 96)],)


@program("torchvision")
def torchvision_faster_rcnn() -> Made:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, rpn_post_nms_top_n_test=20)
    return model.eval(), ([torch.rand(3, 96, 96)],)


@program("torchvision")
def torchvision_transforms() -> Made:
    from torchvision.transforms import v2

    steps = [v2.Resize(32, antialias=True), v2.CenterCrop(24), v2.Normalize([0.5] * 3, [0.2] * 3), v2.GaussianBlur(3)]
    return v2.Compose(steps), (images(),)


@program("vit-pytorch", training=True)
def vit_pytorch_training() -> Made:
    from vit_pytorch import ViT

    return ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=4, mlp_dim=64), (images(32),)


@program("vit-pytorch")
def vit_pytorch_simple() -> Made:
    from vit_pytorch import SimpleViT

    return SimpleViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=4, mlp_dim=64).eval(), (
        images(32),
    )


@program("vit-pytorch")
def vit_pytorch_cct() -> Made:
    from vit_pytorch.cct import CCT

    model = CCT(img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=4, mlp_ratio=2, num_classes=10)
    return model.eval(), (images(32),)


@program("kornia")
def kornia_filters() -> Made:
    import kornia

    def f(x: torch.Tensor) -> Any:
        blurred = kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5))
        return kornia.filters.sobel(blurred), kornia.filters.laplacian(x, 3), kornia.color.rgb_to_hsv(x)

    return f, (images(),)


@program("kornia")
def kornia_geometry() -> Made:
    import kornia

    def f(x: torch.Tensor, angle: torch.Tensor) -> Any:
        turned = kornia.geometry.transform.rotate(x, angle)
        return kornia.geometry.transform.resize(turned, (32, 32))

    return f, (images(), torch.tensor([10.0, 20.0]))


@program("kornia", training=True)
def kornia_losses() -> Made:
    import kornia

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return kornia.losses.ssim_loss(x, y, 5) + kornia.losses.total_variation(x).sum()

    return f, (images().requires_grad_(), images())


@program("kornia")
def kornia_canny() -> Made:
    import kornia

    return kornia.filters.Canny(), (images(),)


@program("segmentation-models-pytorch")
def smp_unet() -> Made:
    import segmentation_models_pytorch as smp

    return smp.Unet("resnet18", encoder_weights=None, classes=3).eval(), (images(),)


@program("segmentation-models-pytorch", training=True)
def smp_fpn_training() -> Made:
    import segmentation_models_pytorch as smp

    model, loss = (
        smp.FPN("mobilenet_v2", encoder_weights=None, classes=1, decoder_dropout=0.0),
        smp.losses.DiceLoss("binary"),
    )
    return _WithLoss(model, loss), (images(), (images()[:, :1] > 0.5).float())


class _WithLoss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), y)


@program("monai")
def monai_unet() -> Made:
    from monai.networks.nets import UNet

    return UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1).eval(), (torch.rand(1, 1, 32, 32),)


@program("monai", training=True)
def monai_segresnet_training() -> Made:
    from monai.losses import DiceCELoss
    from monai.networks.nets import SegResNet

    model = SegResNet(spatial_dims=2, init_filters=8, in_channels=1, out_channels=2)
    return _WithLoss(model, DiceCELoss(to_onehot_y=True, softmax=True)), (
        torch.rand(1, 1, 32, 32),
        torch.randint(0, 2, (1, 1, 32, 32)),
    )


@program("monai")
def monai_swin_unetr() -> Made:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(1, 2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1)).eval(), (torch.rand(1, 1, 64, 64),)


@program("monai")
def monai_sliding_window() -> Made:
    from monai.inferers import sliding_window_inference

    model = nn.Conv2d(1, 2, 3, padding=1)
    return lambda x: sliding_window_inference(x, (16, 16), 4, model), (torch.rand(1, 1, 40, 40),)


@program("lightly", training=True)
def lightly_simclr() -> Made:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    head, loss = SimCLRProjectionHead(32, 32, 16), NTXentLoss()
    return _Pairs(head, loss), (torch.randn(8, 32), torch.randn(8, 32))


@program("lightly", training=True)
def lightly_barlow_twins() -> Made:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    return _Pairs(BarlowTwinsProjectionHead(32, 32, 16), BarlowTwinsLoss()), (torch.randn(8, 32), torch.randn(8, 32))


class _Pairs(nn.Module):
    def __init__(self, head: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), self.head(y))
