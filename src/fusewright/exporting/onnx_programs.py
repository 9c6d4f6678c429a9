"""Exported programs as ONNX files.

Takes an `ExportedProgram` and a path; writes an ONNX model, by PyTorch's exporter. Always holds: sizes that may change
stay so; what ONNX has no words for is an error, never left out.
"""

from __future__ import annotations

import re
from typing import Any

import torch.onnx

from fusewright.backends.onnx_export import onnx_program
from fusewright.base.errors import ExportError
from fusewright.exporting.program import ExportedProgram, Signature
from fusewright.exporting.text import call_text, line_text, target_text


def to_onnx(program: Any, path: Any) -> None:
    """See `fusewright.to_onnx`."""
    if not isinstance(program, ExportedProgram):
        raise ExportError(f"to_onnx takes what fusewright.export gives, got {type(program).__name__}")
    signature = program.graph_signature
    written = [*signature.buffers_to_mutate, *signature.user_inputs_to_mutate]
    if written:
        raise ExportError(f"the program writes to {written[0]}, and an ONNX model writes to nothing: return the value")
    for record in signature.results:
        if record["kind"] == "value":
            raise ExportError(f"the program returns {record['target']!r}; an ONNX model returns tensors only")
    if not signature.results:
        raise ExportError("the program returns no tensor")
    try:
        made = onnx_program(program.to_torch(), _names(signature.leaves))
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(_unsaid(program, str(error))) from error
    _name_sizes(made.model, signature)
    made.save(path)


def _unsaid(program: ExportedProgram, error: str) -> str:
    """What is said of an error of PyTorch's exporter: the operator that it names, and the lines that call it."""
    named = re.search(r"OpOverload\(op='([\w.]+)', overload='(\w+)'\)", error)
    name = ".".join(named.groups()) if named else ""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and target_text(node.target) == name]
    if not name:
        last = [line for line in error.splitlines() if line.startswith("<class")]
        return f"PyTorch's exporter to ONNX refuses this program: {(last or [error])[0]}"
    what = call_text(calls[0]) if calls else name
    lines = "".join(dict.fromkeys(line_text(node) for node in calls))
    return (
        f"ONNX has no words for {what}{lines}\n  what to do: compute it outside of the program and pass the result, or "
        f"write it as operators that ONNX has: program.run_decompositions({{torch.ops.{name}: function}})"
    )


def _name_sizes(model: Any, signature: Signature) -> None:
    """Gives the sizes that may change the names that the user gave them."""
    tensors = [place for place, leaf in enumerate(signature.leaves) if leaf["kind"] == "tensor"]
    labels: dict[str, str] = {}
    for known in signature.symbols.values():
        size = model.graph.inputs[tensors.index(known["leaf"])].shape[known["dim"]]
        if not isinstance(size, int) and known["label"].isidentifier():
            labels[str(size.value)] = known["label"]
    nodes = [value for node in model.graph.all_nodes() for value in node.outputs]
    for value in (*model.graph.inputs, *nodes):
        for dim, size in enumerate(() if value.shape is None else value.shape):
            if not isinstance(size, int) and size.value is not None:
                value.shape[dim] = re.sub(r"\w+", lambda word: labels.get(word[0], word[0]), str(size.value))


def _names(leaves: list[dict[str, Any]]) -> list[str]:
    """A name for each tensor that a call gives: the argument's, as ONNX's tools like names."""
    names: list[str] = []
    for leaf in leaves:
        if leaf["kind"] == "tensor":
            name = re.sub(r"\W+", "_", leaf["name"]).strip("_")
            names.append(name if name not in names else f"{name}_{len(names)}")
    return names
