"""Twenty more architectures of `transformers` for inference, beside those of `models.py`: two layers at the original width, random weights.

Gives ARCHITECTURES: name → builder of a case for a dtype and a batch size. compare.py takes them as `--models architectures --batch 1,8`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models import Case

LENGTH = 128
"""Tokens of a text."""

TEXT = {"num_hidden_layers": 2}
ARCHITECTURES: dict[str, Callable[[torch.dtype, int], Case]] = {}


def _ids(batch: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 1000, (batch, length))


def _text(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch), "attention_mask": torch.ones(batch, LENGTH, dtype=torch.long)}


def _prompt(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch)}


def _pair(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch), "decoder_input_ids": _ids(batch, 64)}


def _image(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, dtype=dtype)}


def _sound(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, 16000, dtype=dtype)}


def _spectrum(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(batch, 80, 1000, dtype=dtype)}


Inputs = Callable[[int, torch.dtype], dict[str, torch.Tensor]]


def _add(name: str, config: str, model: str, inputs: Inputs, **settings: Any) -> None:
    def build(dtype: torch.dtype, batch: int) -> Case:
        import transformers

        net = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return net.to(dtype).eval(), (), inputs(batch, dtype)

    ARCHITECTURES[name] = build


DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 8000,
    "use_cache": False,
}
_add("roberta", "RobertaConfig", "RobertaModel", _text, **TEXT)
_add(
    "electra",
    "ElectraConfig",
    "ElectraModel",
    _text,
    **TEXT,
    hidden_size=768,
    num_attention_heads=12,
    intermediate_size=3072,
)
_add(
    "albert",
    "AlbertConfig",
    "AlbertModel",
    _text,
    **TEXT,
    hidden_size=768,
    num_attention_heads=12,
    intermediate_size=3072,
)
_add("distilbert", "DistilBertConfig", "DistilBertModel", _text, n_layers=2)
_add(
    "deberta_v2",
    "DebertaV2Config",
    "DebertaV2Model",
    _text,
    **TEXT,
    hidden_size=768,
    num_attention_heads=12,
    intermediate_size=3072,
)
_add("opt", "OPTConfig", "OPTForCausalLM", _text, **DECODER, ffn_dim=3072)
_add("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", _prompt, **DECODER, intermediate_size=3072)
_add(
    "mistral", "MistralConfig", "MistralForCausalLM", _prompt, **DECODER, intermediate_size=2048, num_key_value_heads=4
)
_add("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _prompt, **DECODER, intermediate_size=2048, num_key_value_heads=4)
_add(
    "gemma",
    "GemmaConfig",
    "GemmaForCausalLM",
    _prompt,
    **DECODER,
    intermediate_size=2048,
    num_key_value_heads=4,
    head_dim=64,
)
_add("phi", "PhiConfig", "PhiForCausalLM", _prompt, **DECODER, intermediate_size=3072)
_add(
    "bart",
    "BartConfig",
    "BartModel",
    _pair,
    d_model=768,
    encoder_layers=2,
    decoder_layers=2,
    vocab_size=8000,
    use_cache=False,
)
_add("deit", "DeiTConfig", "DeiTModel", _image, **TEXT)
_add("beit", "BeitConfig", "BeitModel", _image, **TEXT)
_add("swin", "SwinConfig", "SwinModel", _image, depths=[2, 2, 2, 2])
_add("segformer", "SegformerConfig", "SegformerModel", _image)
_add("regnet", "RegNetConfig", "RegNetModel", _image)
_add(
    "efficientnet",
    "EfficientNetConfig",
    "EfficientNetModel",
    _image,
    width_coefficient=1.0,
    depth_coefficient=1.0,
    hidden_dim=1280,
)
_add("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model", _sound, **TEXT)
_add("whisper_encoder", "WhisperConfig", "WhisperForAudioClassification", _spectrum, d_model=512, encoder_layers=2, encoder_attention_heads=8,
     encoder_ffn_dim=2048, max_source_positions=500)  # fmt: skip
