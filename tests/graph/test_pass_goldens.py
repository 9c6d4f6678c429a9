"""Each pass over graphs as text: what goes in, what comes out. A new scenario is a text in golden/, `## pass: what it
shows` and the graph; `python -m tests.graph.test_pass_goldens` writes what the pass makes of it below.

What depends on the processor (which of the library's layouts is quickest) is asked here as the passes' defaults answer;
values are compared with eager's by the tests of the passes.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from fusewright.graph import passes
from fusewright.graph.passes.context import Pass, PassContext
from fusewright.graph.passes.precision import half_products as precision
from fusewright.graph.printer import print_graph
from fusewright.graph.verify import GraphError, shared_results, verify, verify_results
from tests import goldens
from tests.graph.texts import graph_of

FOLDER = Path(__file__).parent / "golden"
LISTS = (
    passes.PIPELINE, passes.LAYOUT, passes.PADDING, passes.PRECISION, passes.ATTENTION, passes.LIBRARY, passes.BACKWARD,
    passes.PACKING, passes.CUTTING, passes.JOINING, passes.OVERLAP,
)  # fmt: skip
PASSES: dict[str, Pass] = {one.__name__: one for stage in LISTS for one, _ in stage}


SCENARIOS = goldens.scenarios(FOLDER)


def context() -> PassContext:
    return PassContext(keeps_parameters=True, has_quick_onednn=lambda: True)


def result(heading: str, before: str) -> str:
    given = graph_of(before)
    shared = shared_results(given)
    graph = PASSES[heading.split(":")[0]](given, context())
    verify(graph, functional=True)
    verify_results(graph, shared)
    return print_graph(graph, locations=False).strip()


def same_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(precision, "multiplies", lambda dtype: False)
    patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN and MKL choose other layouts")
@pytest.mark.parametrize("heading", SCENARIOS)
def test_golden(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same_processor(monkeypatch)
    before, after = SCENARIOS[heading]
    assert result(heading, before) == after


def test_a_pass_that_returns_an_input_is_found() -> None:
    """-(-x) is a tensor of its own, though it has the values of x."""
    graph = graph_of("%x: float32[4] = input\n%a = aten.neg(%x)\n%b = aten.neg(%a)\nreturn [%b, %x]")
    shared = shared_results(graph)
    verify_results(graph, shared)
    x, b = graph.find_nodes(op="placeholder")[0], graph.output_node().args[0][0]  # type: ignore[index]
    b.replace_all_uses_with(x)  # type: ignore[union-attr]
    with pytest.raises(GraphError, match="result 0 has become x"):
        verify_results(graph, shared)


def test_every_pass_has_one_that_it_changes() -> None:
    changed = {
        heading.split(":")[0]
        for heading, (before, after) in SCENARIOS.items()
        if print_graph(graph_of(before), locations=False).strip() != after
    }
    assert changed == {*PASSES} - {"specialise"}  # it writes what guards know of symbols, of which a text has none


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        same_processor(patch)
        goldens.write(FOLDER, result)
