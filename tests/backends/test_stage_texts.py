"""What the stages give one another parses back from its complete text, and a compile goes on from there."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import joint, native, pipeline, stage_texts
from fusewright.base.records import dataclass
from fusewright.loops.parser import ParseError
from tests.replay_programs import PROGRAMS

SAMPLE = [name for index, name in enumerate(sorted(PROGRAMS)) if index % 40 == 20]


@dataclass(frozen=True, slots=True)
class Made:
    """One graph's code, what it was made of, and the results of its stages by name."""

    graph: torch.fx.Graph
    to_compile: Any
    name: str
    half: Any
    generated: pipeline.Generated
    results: dict[str, Any]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Made]]:
    """What is compiled in the test."""
    found: list[Made] = []
    results: dict[str, Any] = {}
    run_stage, generate = pipeline.run_stage, pipeline.generate

    def keep(
        to_compile: Any, stage: str, artifact: str, text: Callable[..., str], work: Any, /, *a: Any, **k: Any
    ) -> Any:
        results[stage] = run_stage(to_compile, stage, artifact, text, work, *a, **k)
        return results[stage]

    def keep_all(graph: torch.fx.Graph, to_compile: Any, name: str, half: Any = "") -> pipeline.Generated:
        results.clear()
        generated = generate(graph, to_compile, name, half)
        found.append(Made(graph, to_compile, name, half, generated, dict(results)))
        return generated

    monkeypatch.setattr(pipeline, "run_stage", keep)
    for module in (native, joint, pipeline):
        if hasattr(module, "generate"):
            monkeypatch.setattr(module, "generate", keep_all)
    yield found


def compiled(name: str) -> None:
    def compile(function: Any, **settings: Any) -> Any:
        return fusewright.compile(
            function, **settings | {"options": {**(settings.get("options") or {}), "disk_cache": False}}
        )

    torch.manual_seed(0)
    PROGRAMS[name](compile)


def parsed_back(result: Any) -> Any:
    text, objects = stage_texts.complete_text(result), stage_texts.objects_of(result)
    assert all(isinstance(one, torch.Tensor) or callable(one) for one in objects), objects
    parsed = stage_texts.parse(text, objects)
    assert parsed == result
    assert stage_texts.complete_text(parsed) == text
    return parsed


def round_trip(name: str, made: list[Made]) -> None:
    compiled(name)
    assert made
    for one in made:
        stages = [stage for stage, result in one.results.items() if type(result) in stage_texts.RECORDS]
        assert {"schedule", "memory", "call_plan"} <= {*stages}
        for stage in stages:
            parsed_back(one.results[stage])


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str, made: list[Made]) -> None:
    round_trip(name, made)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_golden_set(name: str, made: list[Made]) -> None:
    round_trip(name, made)


@pytest.mark.parametrize("name", ["residual_block", "sgd", "skinny_products"])
@pytest.mark.parametrize("stage", ["schedule", "memory"])
def test_a_compile_goes_on_from_the_text_of_a_stage(name: str, stage: str, made: list[Made]) -> None:
    compiled(name)
    assert made
    for one in [*made]:
        plan = parsed_back(one.results[stage])
        env = pipeline.env_of(one.graph)
        own = pipeline.TRAINING_OWN_BYTES if one.half else None
        options = pipeline.ScheduleOptions(own_bytes=own, examples={} if env is None else env.examples)
        stages = pipeline.PLAN_STAGES if stage == "schedule" else ()
        selection = pipeline.Selection(plan, options, None, one.half)
        again = pipeline.generate_from(selection, one.graph, one.to_compile, one.name, stages)
        assert again.plan == one.generated.plan
        assert again.code == one.generated.code


TEXT = """Kernel[i0 in 0..8](
  name="k", outer=(Axis(symbol=size(i0), extent=8),), stages=(Stage(axes=(), statements=(
    Store(buffer="out", index=size(i0), value=value(t0 = exp(x:f32[i0]); t0 + acc:f32 * t0)),)),),
  buffers=("x", "out"), dtypes=(torch.float32, torch.float32), written=set("out"),
)
"""


def test_a_kernel_that_was_written_by_hand() -> None:
    kernel = stage_texts.parse(TEXT)
    assert stage_texts.parse(stage_texts.complete_text(kernel)) == kernel
    (store,) = kernel.stages[0].statements
    assert store.value.args[0] is store.value.args[1].args[1] and store.index.upper == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Kernel[", "Parser[", "line 1, column 1: expected a record*"),
        ("acc:f32", "acc", "line 3, column *: expected a value*"),
        ("acc:f32", "acc:load", "line 3, column *: expected a dtype*"),
        ("index=size(i0)", "index=size(i1)", "line 3, column *: expected a symbol with a range*"),
        ("torch.float32", "torch.load", "line 4, column *: expected a dtype*"),
        ("buffers=", "bufers=", "*expected the fields of Kernel*"),
        ('"x", "out"', "object(0)", "line 4, column *: expected the number of an object*"),
        ("torch.float32", "operator(aten.mm.nothing)", "*expected an operator of PyTorch*"),
    ],
)
def test_error_names_the_place(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ParseError) as error:
        stage_texts.parse(TEXT.replace(old, new))
    assert fnmatch.fnmatch(str(error.value), message), error.value
