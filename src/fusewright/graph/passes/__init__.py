"""The passes over ATen graphs, in the order in which they run.

`run(graph)` takes a recorded graph and gives a functional, cleaned one: pure operators, random operators in order, and
epilogue copies into mutated inputs.
"""

from __future__ import annotations

import torch.fx

from fusewright.base.errors import CannotFunctionalise
from fusewright.graph.passes.attention.attention_backward import attention_backward
from fusewright.graph.passes.attention.recomputed_scores import recomputed_scores
from fusewright.graph.passes.attention.short_attention import may_write_out, short_attention
from fusewright.graph.passes.clean.canonicalise import canonicalise
from fusewright.graph.passes.clean.complex_parts import complex_parts
from fusewright.graph.passes.clean.constant_fold import constant_fold
from fusewright.graph.passes.clean.cse import cse
from fusewright.graph.passes.clean.dce import dce
from fusewright.graph.passes.clean.functionalise import functionalise
from fusewright.graph.passes.clean.specialise import specialise
from fusewright.graph.passes.context import Pass, PassContext, PassReport
from fusewright.graph.passes.layout.channels_last import layout
from fusewright.graph.passes.layout.line_convolution import line_convolution
from fusewright.graph.passes.layout.pad_products import may_pad, pad_products
from fusewright.graph.passes.layout.patch_convolution import patch_convolution, patches_in_inference
from fusewright.graph.passes.library.biased_linear import biased_linear
from fusewright.graph.passes.library.convolution_bias import convolution_bias
from fusewright.graph.passes.library.cut_products import cut_products
from fusewright.graph.passes.library.depthwise_gradients import depthwise_gradients
from fusewright.graph.passes.library.embedding_gradients import embedding_gradients
from fusewright.graph.passes.library.join_collectives import join_collectives
from fusewright.graph.passes.library.long_scans import long_scans
from fusewright.graph.passes.library.onednn_gemm import quick_products
from fusewright.graph.passes.library.overlap_collectives import overlap_collectives
from fusewright.graph.passes.parameters.freeze import split_prepacking
from fusewright.graph.passes.parameters.merge_linear import merge_linear
from fusewright.graph.passes.parameters.pack import pack
from fusewright.graph.passes.precision.half_products import half_products, may_widen
from fusewright.graph.passes.precision.norm_results import norm_results
from fusewright.graph.passes.runner import run_passes

PIPELINE: list[tuple[Pass, str]] = [
    (functionalise, "Replaces writes to tensors by new values; mutated inputs are written once, at the end."),
    (specialise, "Writes sizes that guards have fixed as what they equal."),
    (dce, "Removes what nothing uses, so that the next passes look at less."),
    (canonicalise, "Removes views, copies and casts that change nothing, and joins chains of views."),
    (constant_fold, "Computes operators whose arguments are filled with one known number."),
    (complex_parts, "Computes complex numbers as pairs of reals."),
    (long_scans, "Cuts running sums of few long rows on a GPU into parts."),
    (cse, "Computes repeated subexpressions once."),
    (dce, "Removes what the passes before left unused."),
    (specialise, "The same once more, for guards that the passes themselves have asked for."),
]


LAYOUT: list[tuple[Pass, str]] = [
    (patches_in_inference, "Makes matrix products of convolutions over patches that do not overlap."),
    (line_convolution, "Makes convolutions over images of those over lines."),
    (convolution_bias, "Adds the bias of convolutions on a GPU in loops, and sums its gradient there."),
    (layout, "Runs chains of convolutions in channels-last memory format."),
]

PADDING: list[tuple[Pass, str]] = [(pad_products, "Pads matrix products to sizes that start at multiples of 16 bytes.")]

PRECISION: list[tuple[Pass, str]] = [
    (half_products, "Makes products of halves in float32 where the processor does not multiply halves."),
    (cse, "Converts once what several products read."),
]

ATTENTION: list[tuple[Pass, str]] = [
    (short_attention, "Writes out attention of few queries and keys: as loops on a CPU, as products on a GPU."),
    (cse, "Makes once what several layers have in common."),
]

LIBRARY: list[tuple[Pass, str]] = [
    (patch_convolution, "Makes matrix products of convolutions over patches that do not overlap."),
    (depthwise_gradients, "Computes gradients of depthwise weights over small images on contiguous copies."),
    (biased_linear, "Gives linear layers with a bias in bfloat16 to oneDNN."),
    (quick_products, "Gives large products in float32 to oneDNN where it is much quicker than eager's library."),
    (norm_results, "Writes out the results of batch normalisation and log-softmax as pointwise in their statistics."),
    (attention_backward, "Writes out the gradients of attention over short sequences."),
    (recomputed_scores, "Computes attention's scores on a GPU again for their gradients, instead of saving them."),
    (dce, "Removes what that left unused."),
]

CUTTING: list[tuple[Pass, str]] = [
    (cut_products, "Cuts products beside collectives into pieces that overlap."),
    (dce, "Removes what that left unused."),
]

JOINING: list[tuple[Pass, str]] = [(join_collectives, "Begins neighbouring collectives of one kind as one.")]

OVERLAP: list[tuple[Pass, str]] = [
    (overlap_collectives, "Begins collectives as early, and waits for them as late, as the graph allows."),
]

BACKWARD: list[tuple[Pass, str]] = [(embedding_gradients, "Adds rows of embeddings' gradients in place.")]

PACKING: list[tuple[Pass, str]] = [
    (merge_linear, "Makes one product of linear layers that read one input."),
    (
        pack,
        "Gives linear layers and convolutions by parameters to library operators, with packed weights and folded "
        "normalisation.",
    ),
    (quick_products, "Gives other large products in float32 to oneDNN where it is much quicker than eager's library."),
    (dce, "Removes what that left unused."),
]


def run(graph: torch.fx.Graph, context: PassContext | None = None) -> torch.fx.Graph:
    """Run PIPELINE. Raises CannotFunctionalise when a mutation has no pure equivalent (the graph must then run
    eagerly)."""
    return run_passes(graph, PIPELINE, context or PassContext())


__all__ = [
    "ATTENTION", "BACKWARD", "CUTTING", "JOINING", "LAYOUT", "LIBRARY", "OVERLAP", "PACKING", "PADDING", "PIPELINE",
    "PRECISION",
    "CannotFunctionalise",
    "Pass",
    "PassContext", "PassReport", "may_pad", "may_widen", "may_write_out", "run", "run_passes", "split_prepacking",
]  # fmt: skip
