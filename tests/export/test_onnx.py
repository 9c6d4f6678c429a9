"""Exported programs as ONNX files, and the backend that runs graphs by ONNX Runtime, with the real packages."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusewright

for package in ("onnx", "onnxscript"):
    pytest.importorskip(package)
runtime = pytest.importorskip("onnxruntime")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10)).eval()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("example", [1, 3])
def test_a_program_keeps_its_sizes(tmp_path: Path, loaded: bool, example: int) -> None:
    net = mlp()
    batch = fusewright.Dim("batch", min=1, max=256)
    program = fusewright.export(net, (torch.randn(example, 4),), dynamic_shapes=({0: batch},))
    if loaded:
        fusewright.save(program, tmp_path / "program.fw")
        program = fusewright.load(tmp_path / "program.fw")
    fusewright.to_onnx(program, tmp_path / "program.onnx")
    session = runtime.InferenceSession(tmp_path / "program.onnx", providers=["CPUExecutionProvider"])
    assert [(one.name, one.shape) for one in session.get_inputs()] == [("input", ["batch", 4])]
    assert [one.shape for one in session.get_outputs()] == [["batch", 10]]
    for rows in (1, 2, 64):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), net(x))


@pytest.mark.parametrize(
    ("model", "message"), [(nn.BatchNorm1d(4), "writes to"), (lambda x: (x + 1, 2.0), r"returns 2\.0")]
)
def test_what_onnx_has_no_words_for_is_an_error(model: Any, message: str, tmp_path: Path) -> None:
    program = fusewright.export(model, (torch.randn(3, 4),))
    with pytest.raises(fusewright.ExportError, match=message):
        fusewright.to_onnx(program, tmp_path / "program.onnx")


class Net(nn.Module):
    """A buffer that is written to, results in an input's memory, sizes, other dtypes, a constant, one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 6, 3, padding=1), nn.LayerNorm(6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.steps += 1
        y = self.norm(torch.nn.functional.gelu(self.conv(x)).transpose(1, 2))[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y)
        z = torch.softmax(y, -1) * self.steps
        return {"z": z, "again": z, "same": x, "view": x.view(-1), "size": x.shape[0] + 1, "mask": z >= 0, "none": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_backend_agrees_with_eager(dtype: torch.dtype) -> None:
    net = Net().eval().to(dtype)
    reference = copy.deepcopy(net)
    compiled = fusewright.compile(net, backend="onnxrt", fullgraph=True)
    near = {} if dtype == torch.float32 else {"atol": 8 * torch.finfo(dtype).eps, "rtol": 8 * torch.finfo(dtype).eps}
    with torch.no_grad():
        for rows in (2, 3, 5, 1, 7):
            x = torch.randn(rows, 4, 8).to(dtype)
            found, expected = compiled(x), reference(x)
            torch.testing.assert_close(found, expected, **near)
            assert found["same"] is x and found["view"].data_ptr() == x.data_ptr()
            torch.testing.assert_close(net.state_dict(), reference.state_dict())
        net.conv.weight.mul_(2)  # weights are read where they lie
        reference.conv.weight.mul_(2)
        torch.testing.assert_close(compiled(x), reference(x), **near)
    with pytest.raises(fusewright.BackendError, match="no gradients"):
        compiled(torch.randn(2, 4, 8).to(dtype))


def test_the_backend_refuses_random_numbers() -> None:
    compiled = fusewright.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="onnxrt")
    with torch.no_grad(), pytest.raises(fusewright.BackendError, match="random"):
        compiled(torch.ones(4))


@torch.library.custom_op("fusewright_tests::no_onnx", mutates_args=())
def no_onnx(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@no_onnx.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda x: no_onnx(x), r"fusewright_tests\.no_onnx\.default"),
        (lambda x: x + time.perf_counter(), r"time\.perf_counter\(\)"),
        (lambda x: x + random.random(), r"random\.random\(\)"),
        (lambda x: torch.from_numpy(np.sort(x.numpy())), r"numpy\.sort\(\)"),
    ],
)
def test_an_operator_that_onnx_lacks_is_named_with_its_line(model: Any, named: str, tmp_path: Path) -> None:
    program = fusewright.export(model, (torch.randn(3, 4),))
    with pytest.raises(fusewright.ExportError, match=rf"no words for {named}") as found:
        fusewright.to_onnx(program, tmp_path / "program.onnx")
    assert Path(__file__).name in str(found.value)
