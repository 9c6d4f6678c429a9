"""Models of the benchmarks and of the zoo (145 of transformers) as programs: exported with a batch, and a length where they have one, that may
change; saved, loaded in a process that has no such model, and equal to eager at three other sizes. All of them by `-m sweep`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree
from transformers import cache_utils

import fusewright
from fusewright import Dim

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.models import MODELS
from benchmarks.zoo import ROWS

SAMPLE = ["bert", "llama", "bloom", "ctrl", "segformer", "lstm"]
# The program asks for values of tensors, or makes them depend on how many images there are: a graph break, or an error that names the batch.
NOT_WHOLE = {"longformer", "led", "superpoint", "encodec", "vilt", "switch-transformers", "llava"}
# The state of the last call is kept in attributes, which a program does not have.
KEEPS_STATE = {"recurrent-gemma"}
# Python loops over the length, or over its remainder.
OWN_LENGTH = {"deberta", "funnel", "canine", "longt5", "mamba", "falcon-mamba", "mamba2", "rwkv", "jamba", "bamba"}
LENGTHS = {"input_ids", "attention_mask", "token_type_ids"}
CACHES = [one for one in vars(cache_utils).values() if isinstance(one, type)]


def case(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    if name.startswith("benchmark "):
        return MODELS[name.removeprefix("benchmark ")](torch.float32)
    return ROWS[name].build(), (), ROWS[name].inputs()


def resized(value: Any, name: str, batch: int, length: int | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.repeat(-(-batch // value.shape[0]), *[1] * (value.dim() - 1))[:batch]
    if length is not None and name in LENGTHS:
        value = value.repeat(1, -(-length // value.shape[1]))[:, :length]
    return value.contiguous()


def leaves(value: Any) -> list[Any]:
    """What is in containers, and in objects such as a cache, with their classes."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        own = hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type)
        found += [type(leaf), *leaves(vars(leaf))] if own else [leaf]
    return found


SERVER = """
import importlib, json, sys, torch, fusewright
from transformers import cache_utils, modeling_outputs
torch.serialization.add_safe_globals([one for one in vars(cache_utils).values() if isinstance(one, type)])
for line in sys.stdin:
    program, calls, results, module = json.loads(line)
    importlib.import_module(module)  # for the classes of results, and operators of the library's own
    try:
        run = fusewright.load(program).module()
        with torch.no_grad():
            made = [run(*args, **kwargs) for args, kwargs in torch.load(calls, weights_only=False)]
        torch.save(made, results)
        print(json.dumps(""), flush=True)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
"""


class Server:
    """A fresh process that loads programs and calls them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def results(self, program: fusewright.ExportedProgram, calls: list[tuple[Any, Any]], module: str) -> list[Any]:
        files = [str(self.folder / name) for name in ("program.fw", "calls", "results")]
        fusewright.save(program, files[0])
        torch.save(calls, files[1])
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([*files, module]), file=self.process.stdin, flush=True)
        error = json.loads(self.process.stdout.readline())
        assert error == "", error
        return torch.load(files[2], weights_only=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("programs"))
    yield made
    made.process.communicate()


def check(name: str, with_length: bool, server: Server) -> None:
    model, args, kwargs = case(name)
    own = next((value.shape[1] for key, value in kwargs.items() if key in LENGTHS), 0)
    batch, length = Dim("batch", min=1, max=8192), Dim("length", min=4, max=256 if own >= 64 else 48)

    def sizes(value: Any, key: str) -> Any:
        return None if not isinstance(value, torch.Tensor) else {0: batch, 1: length} if with_length and key in LENGTHS else {0: batch}

    shapes = tuple(sizes(value, "") for value in args) if args else {key: sizes(value, key) for key, value in kwargs.items()}
    with torch.no_grad():
        model(*args, **kwargs)  # some set up hooks and caches of their own at their first call
        program = fusewright.export(model, args, kwargs, dynamic_shapes=shapes)
        calls = []
        for more, longer in ((1, own), (3, max(4, own - 3)), (5, own + 7)):
            at = longer if with_length else None
            given = [resized(value, "", more, None) for value in args]
            calls.append((given, {key: resized(value, key, more, at) for key, value in kwargs.items()}))
        for (given, named), got in zip(calls, server.results(program, calls, type(model).__module__), strict=True):
            want = model(*given, **named)
            assert type(got) is type(want)
            pairs = list(zip(leaves(got), leaves(want), strict=True))
            assert any(isinstance(one, torch.Tensor) for one, _ in pairs)
            for one, other in pairs:
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
                else:
                    assert type(one) is type(other) and one == other


@pytest.fixture(autouse=True)
def caches() -> Any:
    transformers.logging.set_verbosity_error()
    with torch.serialization.safe_globals(CACHES):
        yield


def names() -> list[Any]:
    every = [*ROWS, *(f"benchmark {name}" for name in MODELS)]
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.sweep) for name in every]


@pytest.mark.parametrize("name", names())
def test_a_dynamic_batch_and_length_are_eagers_at_other_sizes(name: str, server: Server) -> None:
    if name in NOT_WHOLE | KEEPS_STATE:
        with pytest.raises((fusewright.GraphBreakError, fusewright.ExportError)):
            check(name, False, server)
        return
    check(name, False, server)
    if not LENGTHS.isdisjoint(case(name)[2]):
        if name in OWN_LENGTH:
            with pytest.raises(fusewright.ExportError, match="length"):
                check(name, True, server)
        else:
            check(name, True, server)


FRESH = """
import sys, torch, fusewright
from transformers import cache_utils, modeling_outputs
try:
    fusewright.load(sys.argv[1])
except fusewright.ProgramFileError as error:
    print(error)
torch.serialization.add_safe_globals([one for one in vars(cache_utils).values() if isinstance(one, type)])
made = fusewright.load(sys.argv[1]).module()(input_ids=torch.arange(12).view(3, 4))
assert made.past_key_values.get_seq_length() == 4
torch.save([made.logits, made.past_key_values.layers[1].keys], sys.argv[2])
"""


def test_a_cache_comes_from_a_fresh_process(tmp_path: Path) -> None:
    model = ROWS["llama"].build()
    with torch.no_grad():
        shapes = {"input_ids": {0: Dim("batch"), 1: Dim("length", min=2, max=48)}}
        program = fusewright.export(model, (), {"input_ids": torch.ones(1, 6, dtype=torch.long)}, dynamic_shapes=shapes)
        want = model(input_ids=torch.arange(12).view(3, 4))
    fusewright.save(program, tmp_path / "program.fw")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "program.fw"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "add_safe_globals" in done.stdout
    found = torch.load(tmp_path / "out", weights_only=True)
    torch.testing.assert_close(found, [want.logits, want.past_key_values.layers[1].keys])
