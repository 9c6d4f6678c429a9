"""The first call of one (model, engine) in this process; prints one JSON object as its last line.

Usage: startup_worker.py MODEL ENGINE. MODEL: one of benchmarks/models.py, six, or bert_of_<layers>. ENGINE: fusewright, torch.compile, eager, or jax (model "six" only; runs without PyTorch). Times: `import_s` of the
engine's own import, `first_call_s` of compiling and the first call (what the engine imports late is in it), `again_s` of compiling and
calling the same model anew in this process, with everything imported and nothing taken from a cache of compiled graphs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, __file__.rsplit("/", 2)[0])


def six_by_jax() -> dict[str, float]:
    """Six pointwise operators through XLA. Its backend is started, and its operators are run one by one, before the clock starts."""
    started = time.perf_counter()
    import jax
    import jax.numpy as jnp

    x = jnp.ones((64, 64), "float32") * 0.3

    def f(a: Any, b: Any) -> Any:
        return jax.nn.sigmoid(a) * jnp.tanh(b) + jnp.abs(a) - jnp.exp(-b)

    f(x, x).block_until_ready()
    times = {"import_s": time.perf_counter() - started}
    for name, function in (("first_call_s", f), ("again_s", lambda a, b: f(a, b) * 1.5)):
        started = time.perf_counter()
        jax.jit(function)(x, x).block_until_ready()
        times[name] = time.perf_counter() - started
    return times


def six(dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same six operators in PyTorch."""
    import torch

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(a) * torch.tanh(b) + torch.abs(a) - torch.exp(-b)

    return f, (torch.randn(64, 64, dtype=dtype), torch.randn(64, 64, dtype=dtype)), {}


def deep_bert(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """BERT of that many layers and width 256: what is measured is how compiling grows with depth."""
    import torch
    from transformers import BertConfig, BertModel

    net = BertModel(
        BertConfig(num_hidden_layers=layers, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
    ).eval()
    return (
        net,
        (),
        {"input_ids": torch.randint(0, 1000, (1, 32)), "attention_mask": torch.ones(1, 32, dtype=torch.long)},
    )


def case(model: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    import torch

    from benchmarks.models import MODELS

    if model.startswith("bert_of_"):
        return deep_bert(int(model.removeprefix("bert_of_")))
    return (six if model == "six" else MODELS[model])(torch.float32)


def by_torch(model: str, engine: str) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    function, args, kwargs = case(model)
    with torch.no_grad():
        started = time.perf_counter()
        expected = function(*args, **kwargs)
        times = {"eager_s": time.perf_counter() - started}
        del expected
        started = time.perf_counter()
        if engine == "fusewright":
            import fusewright

            compile: Callable[..., Any] = fusewright.compile
        else:
            compile = torch.compile
        times["import_s"] = time.perf_counter() - started
        started = time.perf_counter()
        compiled = function if engine == "eager" else compile(function)
        compiled(*args, **kwargs)
        times["first_call_s"] = time.perf_counter() - started
        if engine == "fusewright":
            fusewright.reset()
            started = time.perf_counter()
            compile(function, options={"disk_cache": False})(*args, **kwargs)
            times["again_s"] = time.perf_counter() - started
    return times


def main() -> None:
    model, engine = sys.argv[1:3]
    times = six_by_jax() if engine == "jax" else by_torch(model, engine)
    print(json.dumps({"model": model, "engine": engine, **times}))


if __name__ == "__main__":
    main()
