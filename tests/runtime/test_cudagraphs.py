"""CUDA graphs: which plans are recorded (anywhere), and that replays mean what the plan means (on a GPU)."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base import events
from fusewright.base.errors import CacheWarning
from fusewright.codegen.call_plan import build_call_plan
from fusewright.codegen.call_plan_types import CallPlan, CCall, SlotStep
from fusewright.codegen.triton import Processor, generate
from fusewright.runtime import cuda_code, cudagraphs
from fusewright.runtime.cudagraphs import MOST_REPEATS, WARM_UP, Inputs, copies_of, unsafe_reason
from tests.loops.tracing import lowered
from tests.schedule.reference import schedule

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def plan_for_gpu() -> CallPlan:
    """A plan of one kernel, as if its tensors were on a GPU."""
    plan = schedule(lowered(lambda x, y: torch.relu(x + y), [torch.randn(40), torch.randn(40)]))
    made = build_call_plan(plan, generate(list(plan.kernels.values()), plan.buffers, Processor()))
    return replace(made, slots=tuple(replace(slot, device="cuda", device_index=0) for slot in made.slots))


@pytest.mark.parametrize("shown", [
    lambda x: x[:, 1:2].expand(3, 5), lambda x: x.sum().expand(2), lambda x: x[:, :1].expand(3, 4)[:0],
    lambda x: x.t(), lambda x: x.view(12).unfold(0, 4, 2), lambda x: x[1:, ::2],
])  # fmt: skip
def test_copies_of_results_have_their_strides(shown: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = shown(torch.arange(12.0).view(3, 4))
    (copy,) = copies_of([result])
    torch.testing.assert_close(copy, result)
    assert copy.stride() == result.stride()
    assert not copy._is_view() and copy.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()


def test_inputs_that_move_are_copied_and_others_read_in_place() -> None:
    inputs, tensors = Inputs(), (0, 2)
    stays = torch.zeros(3)
    for call in range(WARM_UP + 1):
        moves = torch.full((2,), float(call))
        given = [stays, 7, moves]
        assert not inputs.are_in_place([stays.data_ptr(), call], recorded=False)
        assert inputs.may_be_recorded == (call >= WARM_UP)
    mine = inputs.settle(tensors, given)
    assert (
        mine is not None and mine[0] is stays and mine[1] == 7 and mine[2] is not moves and torch.equal(mine[2], moves)
    )
    assert inputs.fixed == [0] and list(inputs.copied) == [2]
    inputs.copy_in([stays, 7, torch.full((2,), 9.0)])
    assert mine[2].tolist() == [9.0, 9.0]
    assert inputs.are_in_place([stays.data_ptr(), 99], recorded=True)  # what is copied may be anywhere
    for repeat in range(MOST_REPEATS + 1):
        assert not inputs.keep_moving
        assert not inputs.are_in_place([1000 + repeat, 99], recorded=True)
        inputs.fixed = [0]
    assert inputs.keep_moving and not inputs.may_be_recorded and inputs.moving == {0, 1}
    assert Inputs({0}).settle((0,), [torch.zeros(1).expand(4)]) is None


def test_no_memory_to_record_with_is_no_reason_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what the recording itself finds, nor what its inputs are copied to."""
    told, asked = [], []
    recorder = cudagraphs.Recorder(cudagraphs.Loaded(lambda *inputs: "plan", plan_for_gpu(), lambda *inputs: None), told.append)

    def record(*given: Any) -> Any:
        asked.append(given)
        raise torch.OutOfMemoryError("CUDA out of memory") if len(asked) < 3 else RuntimeError("no such thing here")

    pool = types.SimpleNamespace(lock=nullcontext(), memory=None)
    monkeypatch.setattr(cudagraphs, "_pool", lambda index: pool)
    monkeypatch.setattr(cudagraphs, "record", record)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, y = torch.randn(40), torch.randn(40)
    for call in range(1, 3 * WARM_UP + 4):
        assert recorder(x, y) == "plan"
        assert len(asked) == call // (WARM_UP + 1) and bool(told) == (len(asked) == 3)
    assert told == ["no CUDA graph: recording failed: no such thing here"]
    with monkeypatch.context() as patch:
        patch.setattr(cudagraphs, "like", lambda tensor: record())
        asked.clear()
        recorder.reason = ""
        for _ in range(WARM_UP + 2):
            assert recorder(x, torch.randn(40)) == "plan"
        assert asked and len(told) == 1


def test_a_plan_of_kernels_can_be_recorded() -> None:
    assert unsafe_reason(plan_for_gpu()) == ""


def test_reasons_not_to_record() -> None:
    plan = plan_for_gpu()
    on_cpu = replace(plan, slots=tuple(replace(slot, device="cpu", device_index=-1) for slot in plan.slots))
    assert "no GPU" in unsafe_reason(on_cpu)
    first, *rest = plan.slots
    assert "several devices" in unsafe_reason(
        replace(plan, slots=(replace(first, device="cpu", device_index=-1), *rest))
    )
    assert "writes to an input" in unsafe_reason(replace(plan, steps=(SlotStep("mutate", 0), *plan.steps)))
    shared = next(k for k, slot in enumerate(plan.slots) if slot.kind == "input")
    assert "shares memory" in unsafe_reason(replace(plan, outputs=(replace(plan.outputs[0], slot=shared),)))


def test_random_operators_are_seen_behind_c_functions_too() -> None:
    plan = plan_for_gpu()
    dropout = CCall("aten::native_dropout", "aoti_torch_cuda_native_dropout", (), ())
    product = CCall("aten::mm", "aoti_torch_cuda_mm_out", (), ())
    assert "random" in unsafe_reason(replace(plan, steps=(dropout, *plan.steps)))
    assert unsafe_reason(replace(plan, steps=(product, *plan.steps))) == ""


@on_gpu
def test_results_that_are_kept_are_not_overwritten() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).cuda()
    compiled = fusewright.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        inputs = [torch.randn(4, 16, device="cuda") for _ in range(8)]
        kept = [compiled(x) for x in inputs]
        torch.testing.assert_close(kept, [model(x) for x in inputs])
        for parameter in model.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(compiled(inputs[0]), model(inputs[0]))


@on_gpu
def test_replays_on_several_streams_and_a_capture_of_the_users() -> None:
    compiled = fusewright.compile(lambda x: torch.softmax(x * 2, -1), mode="reduce-overhead")
    x = torch.randn(64, 64, device="cuda")
    for _ in range(4):
        compiled(x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for k in range(6):
        with torch.cuda.stream(streams[k % 2]):
            results.append((k, compiled(x + k)))
    torch.cuda.synchronize()
    for k, result in results:
        torch.testing.assert_close(result, torch.softmax((x + k) * 2, -1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x * 2, -1))


@on_gpu
def test_memory_that_is_short_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded later."""
    record, asked, heard = cudagraphs.record, [], list[events.Event]()

    def short(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return record(*given)

    monkeypatch.setattr(cudagraphs, "record", short)
    compiled = fusewright.compile(lambda x: torch.softmax(x * 2, -1), mode="reduce-overhead")
    x = torch.randn(64, 64, device="cuda")
    with events.STREAM.listening(heard.append):
        for _ in range(9):
            torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))
    assert len(asked) == 2 and not [one for one in heard if isinstance(one, events.Hint) and "CUDA graph" in one.text]


@on_gpu
def test_random_numbers_are_not_recorded() -> None:
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        compiled = fusewright.compile(lambda x: torch.nn.functional.dropout(x, 0.5), mode="reduce-overhead")
        x = torch.ones(256, device="cuda")
        assert not torch.equal(compiled(x), compiled(x))
    assert any(isinstance(event, events.Hint) and "random" in event.text for event in heard)


def test_machine_code_is_kept_in_a_folder_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    path = cuda_code.path_of("some key", 90)
    assert path.parent == tmp_path / "cache" / "cubin" and (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert cuda_code.path_of("some key", 80) != path and cuda_code.read(path) is None
    path.write_bytes(b"damaged")
    with pytest.warns(CacheWarning, match="damaged"):
        assert cuda_code.read(path) is None
    (tmp_path / "cache").chmod(0o755)
    assert not cuda_code.path_of("some key", 90).is_relative_to(tmp_path)
