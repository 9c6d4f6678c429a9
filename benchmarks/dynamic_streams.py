"""The streams of sizes of the dynamic benchmark: name → builder of a `Stream`, random weights, nothing downloaded.

A stream is a module, the calls that it gets one after the other, and the calls at which its steady state is measured. A call takes the module
(eager's, or one whose `forward` is compiled), prepares its inputs, and gives the function that is timed. Models are small (2 layers,
widths of 256), so that a whole stream under torch.compile stays within minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Call = Callable[[nn.Module], Callable[[], Any]]


@dataclass(slots=True)
class Stream:
    module: nn.Module
    calls: Sequence[Call]
    steady: Sequence[Call]
    trains: bool = False
    tags: list[str] = field(default_factory=list)


STREAMS: dict[str, Callable[[], Stream]] = {}


def stream(builder: Callable[[], Stream]) -> Callable[[], Stream]:
    """Adds a builder to STREAMS under its function's name."""
    STREAMS[builder.__name__] = builder
    return builder


def plain(*args: Any, **kwargs: Any) -> Call:
    """module(*args, **kwargs)."""
    return lambda module: lambda: module(*args, **kwargs)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 1000, shape)


def _pairs(
    count: int, batches: tuple[int, int], lengths: tuple[int, int], fixed: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """`fixed` pairs scattered among random ones, `count` in all."""
    rng = random.Random(3)
    pairs = [(rng.randint(*batches), rng.randint(*lengths)) for _ in range(count - len(fixed))]
    for pair in fixed:
        pairs.insert(rng.randint(2, len(pairs)), pair)
    return pairs


def _masked(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 + 1 :] = 0
    return {"input_ids": _ids(batch, length), "attention_mask": mask}


def _bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=1000, **more
    )


@stream
def bert() -> Stream:
    from transformers import BertModel

    pairs = _pairs(40, (1, 12), (1, 128), [(1, 17), (5, 1), (1, 1), (1, 64)])
    calls = [plain(**_masked(*pair)) for pair in pairs]
    return Stream(
        BertModel(_bert_config()).eval(),
        calls,
        [plain(**_masked(8, 96)), plain(**_masked(3, 37)), plain(**_masked(2, 128))],
    )


@stream
def bert_train() -> Stream:
    from transformers import BertForMaskedLM

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = BertForMaskedLM(_bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

        def forward(self, **inputs: Any) -> torch.Tensor:
            return self.net(**inputs).loss

    def step(batch: int, length: int) -> Call:
        inputs = {**_masked(batch, length), "labels": _ids(batch, length)}

        def call(module: nn.Module) -> Callable[[], Any]:
            def run() -> torch.Tensor:
                loss = module(**inputs)
                loss.backward()
                return loss

            module.zero_grad()
            return run

        return call

    calls = [step(*pair) for pair in _pairs(16, (1, 8), (2, 96), [(1, 40), (4, 1)])]
    return Stream(Loss().train(), calls, [step(4, 64), step(3, 37)], trains=True)


def _generation(module: nn.Module, static: bool) -> Stream:
    """generate() of 64 tokens for prompts of several sizes; the steady state is one step with 40 tokens in the cache."""
    kwargs: dict[str, Any] = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    if static:
        kwargs["cache_implementation"] = "static"

    def generate(batch: int, length: int) -> Call:
        prompt = _ids(batch, length)
        mask = torch.ones_like(prompt)
        return lambda net: lambda: net.generate(prompt, attention_mask=mask, **kwargs)

    def step(batch: int) -> Call:
        from transformers import DynamicCache, StaticCache

        prompt, token = _ids(batch, 40), _ids(batch, 1)

        def call(net: nn.Module) -> Callable[[], Any]:
            cache = StaticCache(config=net.config, max_cache_len=104) if static else DynamicCache(config=net.config)
            type(net).forward(net, prompt, past_key_values=cache, use_cache=True)
            position = torch.tensor([40])
            return lambda: net(token, past_key_values=cache, use_cache=True, cache_position=position).logits

        return call

    return Stream(module.eval(), [generate(1, 7), generate(2, 12), generate(1, 20)], [step(1), step(3)])


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@stream
def gpt2_generate() -> Stream:
    return _generation(_gpt2(), static=False)


@stream
def gpt2_static_cache() -> Stream:
    return _generation(_gpt2(), static=True)


@stream
def llama_generate() -> Stream:
    return _generation(_llama(), static=False)


@stream
def llama_static_cache() -> Stream:
    return _generation(_llama(), static=True)


@stream
def vit() -> Stream:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=4, intermediate_size=1024, image_size=128
    )

    def images(batch: int, height: int, width: int) -> Call:
        return plain(torch.randn(batch, 3, height, width), interpolate_pos_encoding=True)

    sizes = [
        (2, 128, 128),
        (4, 160, 160),
        (1, 192, 96),
        (3, 224, 224),
        (8, 96, 160),
        (5, 128, 192),
        (1, 64, 64),
        (2, 80, 224),
        (6, 112, 112),
        (4, 128, 128),
    ]
    return Stream(
        ViTModel(config).eval(), [images(*size) for size in sizes], [images(4, 160, 160), images(2, 128, 128)]
    )


@stream
def resnet50() -> Stream:
    from transformers import ResNetConfig, ResNetForImageClassification

    def images(batch: int, height: int, width: int) -> Call:
        return plain(torch.randn(batch, 3, height, width))

    sizes = [
        (2, 96, 96),
        (4, 128, 128),
        (1, 160, 112),
        (3, 75, 75),
        (6, 64, 64),
        (1, 97, 131),
        (2, 128, 96),
        (5, 80, 80),
        (1, 64, 64),
        (2, 160, 160),
    ]
    return Stream(
        ResNetForImageClassification(ResNetConfig()).eval(),
        [images(*size) for size in sizes],
        [images(4, 128, 128), images(2, 97, 97)],
    )


@stream
def t5() -> Stream:
    from transformers import T5Config, T5Model

    config = T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=256,
        d_kv=64,
        num_heads=4,
        d_ff=1024,
        vocab_size=1000,
        use_cache=False,
    )

    def call(batch: int, source: int, target: int) -> Call:
        return plain(input_ids=_ids(batch, source), decoder_input_ids=_ids(batch, target))

    sizes = [
        (2, 32, 16),
        (3, 40, 20),
        (1, 64, 1),
        (4, 17, 31),
        (2, 100, 1),
        (5, 9, 64),
        (1, 1, 8),
        (8, 50, 50),
        (2, 33, 2),
        (6, 128, 12),
    ]
    return Stream(T5Model(config).eval(), [call(*size) for size in sizes], [call(4, 64, 32), call(3, 37, 19)])


class Packed(nn.Module):
    """Sequences laid end to end: attention within each, marked by segment numbers; a mean over each sequence at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(256, 768) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = segments[:, None] == segments[None, :]
        mask = mask & torch.ones_like(mask).tril()
        for norm, projection, output in zip(self.norms, self.projections, self.outputs):
            q, k, v = projection(norm(x)).view(-1, 3, 4, 64).permute(1, 2, 0, 3).unbind(0)
            attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
            x = x + output(attended.transpose(0, 1).reshape(-1, 256))
        sums = x.new_zeros(count, 256).index_add(0, segments, x)
        lengths = x.new_zeros(count).index_add(0, segments, torch.ones_like(segments, dtype=x.dtype))
        return sums / lengths[:, None]


@stream
def packed() -> Stream:
    def call(*lengths: int) -> Call:
        segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return plain(_ids(len(segments)), segments, len(lengths))

    rng = random.Random(5)
    calls = [call(*(rng.randint(1, 60) for _ in range(rng.randint(1, 9)))) for _ in range(20)]
    return Stream(Packed().eval(), calls, [call(40, 60, 80), call(13, 7, 50, 31)])


class GraphNet(nn.Module):
    """Messages gathered along edges, transformed and summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))
        self.updates = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for message, update in zip(self.messages, self.updates):
            sent = torch.relu(message(torch.cat((nodes[source], nodes[target]), -1)))
            received = torch.zeros_like(nodes).index_add(0, target, sent)
            degree = torch.zeros(nodes.shape[0]).scatter_add(0, target, torch.ones(target.shape[0]))
            nodes = nodes + torch.relu(update(torch.cat((nodes, received / degree.clamp(min=1)[:, None]), -1)))
        return nodes.mean(0)


@stream
def gnn() -> Stream:
    def call(nodes: int, edges: int) -> Call:
        return plain(torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges)))

    sizes = [
        (50, 200),
        (80, 311),
        (3, 1),
        (100, 1000),
        (7, 0),
        (64, 512),
        (1, 5),
        (37, 101),
        (500, 4000),
        (2, 2),
        (90, 90),
        (1, 1),
        (13, 600),
    ]
    return Stream(GraphNet().eval(), [call(*size) for size in sizes], [call(500, 4000), call(97, 401)])


class Counted(nn.Module):
    """An integer argument that changes: a position, a width, a factor."""

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return (x[:, :count].softmax(-1) * count).sum(-1) + x.shape[1] - count


@stream
def integers() -> Stream:
    x = torch.randn(64, 1024)
    calls = [plain(x, count) for count in (10, 20, 33, 1, 0, 2, 128, 1000, 7, 3, 1024, 64)]
    return Stream(Counted().eval(), calls, [plain(x, 512), plain(x, 777)])
