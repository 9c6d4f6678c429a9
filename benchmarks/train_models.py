"""The training benchmark's models: name → builder of (module whose call gives the loss, keyword arguments), random weights.

`transformers` models are made from configs (nothing is downloaded), 2 to 4 layers where the original is deep. Dropout is as the
configs have it: on where the original trains with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Case = tuple[nn.Module, dict[str, Any]]

MODELS: dict[str, Callable[[], Case]] = {}


def model(builder: Callable[[], Case]) -> Callable[[], Case]:
    """Adds a builder to MODELS under its function's name."""
    MODELS[builder.__name__] = builder
    return builder


def _ids(batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


class LossOf(nn.Module):
    """The loss that a Hugging Face model computes from its labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.net(**inputs).loss


@model
def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    net = BertForMaskedLM(BertConfig(num_hidden_layers=4, vocab_size=8000))
    return LossOf(net), {
        "input_ids": _ids(4, 128),
        "attention_mask": torch.ones(4, 128, dtype=torch.long),
        "labels": _ids(4, 128),
    }


@model
def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = _ids(2, 128)
    net = GPT2LMHeadModel(GPT2Config(n_layer=4, vocab_size=8000, use_cache=False, bos_token_id=0, eos_token_id=0))
    return LossOf(net), {"input_ids": tokens, "labels": tokens}


@model
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = _ids(2, 128)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4, vocab_size=8000,
        use_cache=False,
    )  # fmt: skip
    return LossOf(LlamaForCausalLM(config)), {"input_ids": tokens, "labels": tokens}


@model
def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(ViTConfig(num_hidden_layers=4, num_labels=10))
    return LossOf(net), {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.randint(0, 10, (2,))}


@model
def resnet50() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    net = ResNetForImageClassification(ResNetConfig(num_labels=10))
    return LossOf(net), {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}


@model
def convnext() -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    net = ConvNextForImageClassification(ConvNextConfig(depths=[2, 2, 3, 2], num_labels=10))
    return LossOf(net), {"pixel_values": torch.randn(2, 3, 224, 224), "labels": torch.randint(0, 10, (2,))}


@model
def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(num_layers=3, num_decoder_layers=3, vocab_size=8000, use_cache=False, decoder_start_token_id=0)
    return LossOf(T5ForConditionalGeneration(config)), {"input_ids": _ids(2, 64), "labels": _ids(2, 64)}


@model
def mobilenet_v2() -> Case:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    net = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=10))
    return LossOf(net), {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}


@model
def lstm() -> Case:
    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4000, 256)
            self.lstm = nn.LSTM(256, 512, num_layers=2, dropout=0.2, batch_first=True)
            self.head = nn.Linear(512, 4000)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            states, _ = self.lstm(self.embedding(tokens[:, :-1]))
            return functional.cross_entropy(self.head(states).flatten(0, 1), tokens[:, 1:].flatten())

    return LanguageModel(), {"tokens": _ids(8, 65, 4000)}


@model
def mlp() -> Case:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for _ in range(4):
                layers += [nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 512)]
            self.body, self.head = nn.Sequential(*layers), nn.Linear(512, 10)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(self.body(x)), labels)

    return Classifier(), {"x": torch.randn(64, 512), "labels": torch.randint(0, 10, (64,))}


@model
def gan_critic() -> Case:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [3, 32, 64, 128]
            layers: list[nn.Module] = []
            for before, after in itertools.pairwise(widths):
                layers += [nn.Conv2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
            self.body, self.head = nn.Sequential(*layers), nn.Linear(128 * 8 * 8, 1)

        def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
            judged = [self.head(self.body(images).flatten(1)) for images in (real, fake)]
            return functional.softplus(-judged[0]).mean() + functional.softplus(judged[1]).mean()

    return Critic(), {"real": torch.randn(8, 3, 64, 64), "fake": torch.randn(8, 3, 64, 64)}
