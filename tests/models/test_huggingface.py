"""Unmodified Hugging Face models (tiny configs, random weights): one graph each, and eager's outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import fusewright

Case = tuple[torch.nn.Module, dict[str, Any]]


def ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 90, (batch, length))


def bert() -> Case:
    config = hf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
    )
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    return hf.BertModel(config), {"input_ids": ids(), "attention_mask": mask}


def gpt2() -> Case:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, use_cache=False)
    ), {"input_ids": ids()}


def llama() -> Case:
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config), {"input_ids": ids()}


def vit() -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    return hf.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def resnet() -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1])
    return hf.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def convnext() -> Case:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1])
    return hf.ConvNextModel(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def t5() -> Case:
    config = hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, use_cache=False)
    return hf.T5Model(config), {"input_ids": ids(), "decoder_input_ids": ids(2, 9)}


def mobilenet_v2() -> Case:
    config = hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35)
    return hf.MobileNetV2ForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


MODELS: list[Callable[[], Case]] = [bert, gpt2, llama, vit, resnet, convnext, t5, mobilenet_v2]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.double().abs().max().item() or 1.0
    return (got.double() - expected.double()).abs().max().item() / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_whole_model_is_one_graph_and_equals_eager(build: Callable[[], Case], dtype: torch.dtype) -> None:
    model, inputs = build()
    model = model.eval().to(dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs)
        exact = tensors(
            copy.deepcopy(model).double()(
                **{name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}
            )
        )
        compiled = fusewright.compile(model, fullgraph=True)
        for _ in range(2):
            got = compiled(**inputs)
            assert type(got) is type(expected)
            assert list(got.keys()) == list(expected.keys())
            triples = list(zip(tensors(got), tensors(expected), exact, strict=True))
            assert triples
            for mine, theirs, truth in triples:
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
                # bfloat16: eager itself rounds after every operator; where the two differ by more, ours must be as near to float64's
                # result.
                close = relative_error(mine, theirs) < (1e-5 if dtype is torch.float32 else 1e-2)
                assert close or (
                    dtype is torch.bfloat16 and relative_error(mine, truth) <= 1.25 * relative_error(theirs, truth)
                )
