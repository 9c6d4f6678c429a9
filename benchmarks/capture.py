"""What capture costs: from bytecode to a recorded graph, beside torch._dynamo with backend="eager", which does no more than capture either.

Usage: capture.py [--models bert,gpt2,llama,resnet50] [--repeats 5]

Each sample is a process of its own, the two engines in turn: the first compile after all imports ("fresh"), and the compile after `reset()`
("again"). Figures are medians in seconds. fusewright records ATen operators (what its native backend takes); its backend="eager" records at the
torch level, as torch._dynamo does. A call in eager, which each first call includes, is subtracted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENGINES = ("fusewright aten", "fusewright eager", "torch._dynamo")


def llama() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=512,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2000,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(0, 2000, (1, 32))}


def bert() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    ).eval()
    return model, {"input_ids": torch.randint(0, 1000, (2, 32)), "attention_mask": torch.ones(2, 32, dtype=torch.long)}


def gpt2() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=2000, use_cache=False)).eval()
    return model, {"input_ids": torch.randint(0, 1000, (2, 32))}


def resnet50() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()).eval(), {"pixel_values": torch.randn(1, 3, 64, 64)}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "resnet50": resnet50,
}


def sample(name: str, engine: str) -> dict[str, float]:
    """One process's figures."""
    import torch

    import fusewright
    import fusewright.compiler
    from fusewright.base import events

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    captured: list[float] = []
    events.STREAM.subscribers.append(
        lambda event: captured.append(event.seconds) if isinstance(event, events.Captured) else None
    )
    if engine == "torch._dynamo":
        import torch._dynamo

        compiled, reset = torch.compile(model, backend="eager"), torch._dynamo.reset
    else:
        compiled, reset = (
            fusewright.compile(model, fullgraph=True, backend="native" if engine.endswith("aten") else "eager"),
            fusewright.reset,
        )
    seconds = []
    with torch.no_grad():
        model(**inputs)
        started = time.perf_counter()
        model(**inputs)
        eager = time.perf_counter() - started
        for _ in range(2):
            captured.clear()
            started = time.perf_counter()
            compiled(**inputs)
            taken = time.perf_counter() - started
            seconds.append(sum(captured) if engine.endswith("aten") else taken - eager)
            reset()
    return {"fresh": seconds[0], "again": seconds[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sample", default="")
    arguments = parser.parse_args()
    if arguments.sample:
        name, engine = arguments.sample.split(":")
        print(json.dumps(sample(name, engine)))
        return
    print(f"{'model':10} {'engine':18} {'fresh s':>8} {'again s':>8}")
    for name in arguments.models.split(","):
        found: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
        for _ in range(arguments.repeats):
            for engine, samples in found.items():
                done = subprocess.run(
                    [sys.executable, __file__, "--sample", f"{name}:{engine}"],
                    capture_output=True,
                    text=True,
                    cwd=ROOT,
                    check=True,
                )
                samples.append(json.loads(done.stdout.strip().splitlines()[-1]))
        for engine, samples in found.items():
            middle = {key: statistics.median(one[key] for one in samples) for key in ("fresh", "again")}
            print(f"{name:10} {engine:18} {middle['fresh']:8.3f} {middle['again']:8.3f}", flush=True)


if __name__ == "__main__":
    main()
