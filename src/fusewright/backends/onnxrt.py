"""Backend `onnxrt`: graphs exported to ONNX and run by ONNX Runtime on the CPU, for inference.

Takes torch-level graphs; gives callables over an ONNX Runtime session. Always holds: without the packages the name is
an error that says what to install; a call that wants gradients is an error, since ONNX Runtime gives none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.backends.registry import from_callable, required
from fusewright.base.errors import BackendError

required("onnxrt", {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"})


def _compile(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    import onnxruntime

    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    ):
        raise BackendError("ONNX Runtime computes no gradients: call under torch.no_grad()")
    program = torch.onnx.export(module, tuple(example_inputs), dynamo=True, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Any) -> tuple[Any, ...]:
        arrays = [value.detach().contiguous().numpy() for value in inputs]
        feeds = (
            dict(zip(names, arrays))
            if len(names) == len(arrays)
            else {name: arrays[_position(name, module)] for name in names}
        )
        return tuple(torch.from_numpy(array) for array in session.run(None, feeds))

    return run


def _position(name: str, module: torch.fx.GraphModule) -> int:
    """The exporter leaves out inputs that nothing uses."""
    return [node.name for node in module.graph.nodes if node.op == "placeholder"].index(name)


BACKEND = from_callable(_compile, "onnxrt", dynamic=False)
