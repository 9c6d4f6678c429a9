"""Recurrent layers over a length that varies, as one operator: PyTorch's own operators write a step for each element of the sequence.

Takes what `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` take; gives their outputs and last states. Always holds: it computes what they
do, by calling them, without dropout and without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define(
    "recurrent(Tensor input, Tensor state, Tensor[] params, bool has_biases, int num_layers, bool bidirectional, bool batch_first, "
    "str kind) -> (Tensor, Tensor)"
)
RECURRENT = torch.ops.fusewright.recurrent.default

_KINDS = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}


def _run(
    input: torch.Tensor,
    state: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _KINDS[kind](input, state, list(params), has_biases, num_layers, 0.0, False, bidirectional, batch_first)
    return made[0], made[1]


def _shapes(
    input: torch.Tensor,
    state: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    length, batch = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
    outputs = input.new_empty((length, batch, state.shape[2] * (2 if bidirectional else 1)))
    return outputs.transpose(0, 1) if batch_first else outputs, input.new_empty(state.shape)


_LIBRARY.impl("recurrent", _run, "CPU")
_LIBRARY.impl("recurrent", _shapes, "Meta")
