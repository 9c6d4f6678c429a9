"""Tiny models with random weights for the training tests: each is a module whose call with its inputs gives a scalar loss.

Takes a dropout probability; gives (module, keyword arguments). Always holds: the same seed gives the same weights and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

Case = tuple[nn.Module, dict[str, Any]]


def ids(batch: int = 2, length: int = 16, vocabulary: int = 90) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


class LossOf(nn.Module):
    """The loss that a Hugging Face model computes from its labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.model(**inputs).loss


def bert(dropout: float) -> Case:
    config = hf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    return LossOf(hf.BertForMaskedLM(config)), {"input_ids": ids(), "attention_mask": mask, "labels": ids()}


def gpt2(dropout: float) -> Case:
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    tokens = ids()
    return LossOf(hf.GPT2LMHeadModel(config)), {"input_ids": tokens, "labels": tokens}


def llama(dropout: float) -> Case:
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
        use_cache=False, attention_dropout=dropout,
    )  # fmt: skip
    tokens = ids()
    return LossOf(hf.LlamaForCausalLM(config)), {"input_ids": tokens, "labels": tokens}


def vit(dropout: float) -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8, num_labels=5,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return LossOf(hf.ViTForImageClassification(config)), {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "labels": torch.tensor([1, 3]),
    }


def resnet(dropout: float) -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1], num_labels=5)
    return LossOf(hf.ResNetForImageClassification(config)), {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.tensor([1, 3, 0, 2]),
    }


def convnext(dropout: float) -> Case:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1], num_labels=5, drop_path_rate=dropout)
    return LossOf(hf.ConvNextForImageClassification(config)), {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "labels": torch.tensor([1, 3]),
    }


def t5(dropout: float) -> Case:
    config = hf.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, use_cache=False, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LossOf(hf.T5ForConditionalGeneration(config)), {"input_ids": ids(), "labels": ids(2, 9)}


def mobilenet_v2(dropout: float) -> Case:
    config = hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35, num_labels=5, classifier_dropout_prob=dropout)
    return LossOf(hf.MobileNetV2ForImageClassification(config)), {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.tensor([1, 3, 0, 2]),
    }


class LanguageModel(nn.Module):
    """Embedding, a recurrent network, a classifier over the vocabulary."""

    def __init__(self, recurrent: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.recurrent = recurrent(16, 24, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(tokens[:, :-1]))
        return functional.cross_entropy(self.head(states).flatten(0, 1), tokens[:, 1:].flatten())


def lstm(dropout: float) -> Case:
    return LanguageModel(nn.LSTM, dropout), {"tokens": ids(3, 8, 50)}


def rnn(dropout: float) -> Case:
    return LanguageModel(nn.RNN, dropout), {"tokens": ids(3, 8, 50)}


TRANSFORMERS: list[Callable[[float], Case]] = [bert, gpt2, llama, vit, resnet, convnext, t5, mobilenet_v2]
MODELS: list[Callable[[float], Case]] = [*TRANSFORMERS, lstm, rnn]


def build(make: Callable[[float], Case], dropout: float = 0.0, seed: int = 0) -> Case:
    """The model in training mode."""
    torch.manual_seed(seed)
    module, inputs = make(dropout)
    return module.train(), inputs
