"""The benchmark's models: name → builder of (callable, positional arguments, keyword arguments), random weights, ready for inference.

`transformers` models are made from configs (nothing is downloaded), 2 to 4 layers where the original is deep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

MODELS: dict[str, Callable[[torch.dtype], Case]] = {}


def model(builder: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
    """Adds a builder to MODELS under its function's name."""
    MODELS[builder.__name__] = builder
    return builder


def case(name: str, dtype: torch.dtype) -> Case:
    """The case of a name: of MODELS, or an architecture with its batch size (`roberta:8`)."""
    if ":" not in name:
        return MODELS[name](dtype)
    from benchmarks.architectures import ARCHITECTURES

    architecture, _, batch = name.partition(":")
    return ARCHITECTURES[architecture](dtype, int(batch))


def _ready(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return module.to(dtype).eval()


def _ids(batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


@model
def bert(dtype: torch.dtype) -> Case:
    from transformers import BertConfig, BertModel

    net = BertModel(BertConfig(num_hidden_layers=4))
    return _ready(net, dtype), (), {"input_ids": _ids(4, 128), "attention_mask": torch.ones(4, 128, dtype=torch.long)}


@model
def gpt2(dtype: torch.dtype) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _ready(GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)), dtype), (), {"input_ids": _ids(2, 128)}


@model
def llama(dtype: torch.dtype) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8000,
        use_cache=False,
    )
    return _ready(LlamaForCausalLM(config), dtype), (), {"input_ids": _ids(1, 128)}


@model
def vit(dtype: torch.dtype) -> Case:
    from transformers import ViTConfig, ViTModel

    return _ready(ViTModel(ViTConfig(num_hidden_layers=4)), dtype), (torch.randn(2, 3, 224, 224, dtype=dtype),), {}


@model
def resnet50(dtype: torch.dtype) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _ready(ResNetForImageClassification(ResNetConfig()), dtype), (torch.randn(2, 3, 224, 224, dtype=dtype),), {}


@model
def convnext(dtype: torch.dtype) -> Case:
    from transformers import ConvNextConfig, ConvNextModel

    return (
        _ready(ConvNextModel(ConvNextConfig(depths=[2, 2, 3, 2])), dtype),
        (torch.randn(1, 3, 224, 224, dtype=dtype),),
        {},
    )


@model
def t5(dtype: torch.dtype) -> Case:
    from transformers import T5Config, T5Model

    net = T5Model(T5Config(num_layers=3, num_decoder_layers=3, use_cache=False))
    return _ready(net, dtype), (), {"input_ids": _ids(2, 64), "decoder_input_ids": _ids(2, 64)}


@model
def mobilenet_v2(dtype: torch.dtype) -> Case:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return (
        _ready(MobileNetV2ForImageClassification(MobileNetV2Config()), dtype),
        (torch.randn(2, 3, 224, 224, dtype=dtype),),
        {},
    )


@model
def transformer_layer(dtype: torch.dtype) -> Case:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
            self.norm1, self.norm2 = nn.LayerNorm(512), nn.LayerNorm(512)
            self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
            return self.norm2(x + self.down(torch.relu(self.up(x))))

    return _ready(Layer(), dtype), (torch.randn(8, 128, 512, dtype=dtype),), {}


@model
def mlp(dtype: torch.dtype) -> Case:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)]
    return _ready(nn.Sequential(*layers), dtype), (torch.randn(32, 512, dtype=dtype),), {}


@model
def norm_linear_gelu(dtype: torch.dtype) -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.gelu(self.linear(self.norm(x)))

    return _ready(Block(), dtype), (torch.randn(32, 512, 512, dtype=dtype),), {}


@model
def six_pointwise(dtype: torch.dtype) -> Case:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.abs(torch.sigmoid(x) * torch.tanh(y) + x) - y * 0.5

    return chain, (torch.randn(4096, 4096, dtype=dtype), torch.randn(4096, 4096, dtype=dtype)), {}


@model
def sixteen_elements(dtype: torch.dtype) -> Case:
    def small(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) * 2

    return small, (torch.randn(16, dtype=dtype), torch.randn(16, dtype=dtype)), {}
