"""One tiny model of each family of the zoo (`benchmarks/zoo.py`): one graph, eager's whole output, eager's tokens; all models as a sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fusewright
from fusewright.base.events import STREAM, Broken, Captured, Event, FellBack, Skipped

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.coverage import TOLERANCE, difference, measure
from benchmarks.zoo import ROWS

# text encoder, decoder (a sliding window), encoder-decoder, vision, audio, multimodal, mixture of experts, recurrent
SLICE = ["deberta-v2", "gemma2", "t5", "swin", "wav2vec2", "clip", "mixtral", "lstm"]
GENERATING = ["llama", "mistral"]
NEW_TOKENS = 8
# What no compiler that keeps eager's results can capture whole: the program itself asks for values of tensors.
BREAKING = {"longformer", "led", "vilt", "superpoint", "encodec", "switch-transformers"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def listen(events: list[Event]) -> Any:
    return STREAM.listening(
        lambda event: events.append(event) if isinstance(event, Captured | Broken | Skipped | FellBack) else None
    )


@pytest.mark.parametrize("name", SLICE)
def test_a_model_of_each_family_is_one_graph_and_equals_eager(name: str) -> None:
    row = ROWS[name]
    model, inputs = row.build(), row.inputs()
    events: list[Event] = []
    with torch.no_grad(), listen(events):
        expected = model(**inputs)
        compiled = fusewright.compile(model, fullgraph=True)
        for _ in range(2):
            assert difference(compiled(**inputs), expected) <= TOLERANCE
    assert [type(event) for event in events] == [Captured]


@pytest.mark.parametrize("name", GENERATING)
def test_generate_gives_eagers_tokens_with_two_compiles(name: str) -> None:
    """The prompt, and all tokens after it: a model that leaves tensors in a cache will meet them again, so sizes and counters are symbolic."""
    row = ROWS[name]
    assert row.generate_inputs is not None
    model, inputs = row.build(), row.generate_inputs()
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    events: list[Event] = []
    with listen(events):
        got = fusewright.compile(model, fullgraph=True).generate(**inputs, **settings)
    assert torch.equal(got, expected)
    assert [type(event) for event in events] == [Captured] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", ROWS)
def test_every_model_of_the_zoo(name: str) -> None:
    record = measure(name, generate=True)
    assert record["difference"] <= TOLERANCE
    assert record["whole"] or name in BREAKING, record["reason"]
    assert record.get("generate", {"equal": True})["equal"] and record.get("outermost", {"equal": True})["equal"]
