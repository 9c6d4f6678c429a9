"""The constants that decide between candidates for one computation.

Takes nothing; gives numbers. Always holds: they decide what is quick, never what is right. Each says what it decides,
the machine that it was measured on and the date since which it stands. Commands were not recorded; where the machine
was not either, it says so.
"""

from __future__ import annotations

import torch

# --- autotuning on a GPU: select/autotune.py

MARGIN = 0.03
"""Decides: when another candidate takes the default's place. Share of the time of what runs without tuning that
another candidate must save. Machine: not recorded; since 2026-11-21."""

MAY_WIN = 1.2
"""Decides: which candidates are measured further. Candidates that take longer than this many times the quickest one's
time are not measured further. Machine: not recorded; since 2026-11-21."""

LEAST_TUNED_WORK = 1 << 20
"""Decides: which products are autotuned. Multiplications of a product that is worth measuring. Machine: not recorded;
since 2026-11-21."""

SKINNY = 64
"""Decides: which products on a GPU are compiled for memory rather than for arithmetic, and may run as one kernel though
their columns differ. Rows up to which weights take longer to read than to multiply. Machine: not recorded; since
2026-11-22."""

LEAST_TUNED_BYTES = 1 << 22
"""Decides: which kernels' block sizes are autotuned. Memory that a kernel must touch for its block sizes to be worth
measuring. Machine: not recorded; since 2026-11-21."""


# --- scans on a GPU: graph/passes/library/long_scans.py

LONG_SCAN, MOST_SCAN_ROWS, SCAN_PART = 16384, 512, 4096
"""Decides: which running sums are cut into parts, and the most elements of a part. Not measured: four rows of a million
took 0.88 ms whole on an H100, which copies them in 0.01."""

# --- operands that a product computes: select/prologues.py

MOST_PROLOGUE_NODES = 64
"""Decides: which values a product may compute for itself. Of an expression that a product computes again for each
block of its result. Machine: not recorded; since 2026-11-22."""


# --- generated GEMM and attention on a CPU: select/generated_gemm.py

MOST_ROWS = 16
"""Decides: for how many rows a generated GEMM exists. With more, multiplying takes longer than reading the weights: a
library's kernels, made for that, are quicker. Machine: not recorded; since 2026-11-22."""

MOST_ROWS_OF_FLOATS = 8
"""Decides: the same in float32. In float32, where MKL's packed matrix reads as quickly: 1.1 to 1.25 times as quick
with 16 rows, 0.95 to 1 with 8, 0.8 to 1 with less. Machine: not recorded; since 2026-11-22."""

MOST_ROWS_BESIDE_TILES = 2
"""Decides: the same beside AMX. Where the processor multiplies tiles of halves (AMX), and the library uses that.
Machine: not recorded; since 2026-11-22."""

MOST_ROWS_BESIDE_HALVES = 4
"""Decides: the same beside vectors of halves. Where it multiplies vectors of halves (AVX512-BF16, Zen 5): 0.3 to 0.9
of the library's time, with 8 rows 0.8 to 1.2. Machine: two cores of Zen 5; since 2026-11-22."""

MOST_ATTENTION_WORK = 1 << 19
"""Decides: attention over sizes that vary: kernel or library. Multiplications of queries by keys up to which
attention is quicker by a kernel that is generated. Twelve heads of 64, library and ours, us: 1 query and 10, 40, 200,
1000 keys 54 and 6, 59 and 11, 94 and 57, 455 and 359; 16 queries and 40 keys 131 and 97; 4 and 400 212 and 489
(float32; in bfloat16 without instructions for it 1.6 to 12 times as quick, up to 1000 keys). Machine: not recorded;
since 2026-11-22."""

LEAST_QUERIES = 16
"""Decides: attention over known sizes: kernel or library. From which on attention over sizes that are known is by a
kernel that is generated. Machine: two cores of Zen 5; since 2026-11-22."""

LITTLE_WORK = 1 << 20
"""Decides: products that a generated GEMM computes whatever their rows. Multiplications up to which any number of
rows is quicker without a library's call. Machine: not recorded; since 2026-11-22."""


# --- a linear layer's candidates: select/linear.py

BUDGET = 0.1
"""Decides: how long a compile measures. Seconds that one compile may spend on measuring. Machine: not recorded; since
2026-11-21."""

LONGEST = 3e-3
"""Decides: what is not measured. Seconds: what takes longer than this once is not tried. Machine: not recorded; since
2026-11-21."""

LARGEST_MEASURED = 32 << 20
"""Decides: what is not measured. Bytes: a larger matrix takes long to lay out. Machine: not recorded; since
2026-11-21."""

LEAST_MEASURED_WORK = 1 << 16
"""Decides: what stays with the plain operator. Multiplications: less is a matter of a call's overhead, which the
operator as it is has least of. Machine: not recorded; since 2026-11-21."""

CLEARLY = 0.95
"""Decides: when the default is left. Another way is taken when it needs less than this share of the likely one's
time. Machine: not recorded; since 2026-11-21."""

FAR = 0.8
"""Decides: when the default is left for oneDNN over varying rows. The same for oneDNN's packed weights in float32
where rows vary: its results lie in memory of their own, not in the arena, which a try does not show (whole models
over varying sizes take 1.07 to 1.3 times as long as with weights turned where a try says 0.9 to 1). Machine: not
recorded; since 2026-11-22."""

MULTIPLICATIONS_A_SECOND = {torch.float32: 1e11, torch.bfloat16: 4e11, torch.float16: 4e11}
"""Decides: what is not measured. Multiplications a second, roughly: to tell what is not worth a try before trying it.
Machine: not recorded; since 2026-11-21."""

MUCH = 0.75
"""Decides: whether oneDNN is much quicker than eager's library. oneDNN is taken to be much quicker with less than
this share of eager's time. Two cores with AVX-512, 512x3072x768: on Zen 5, where MKL uses half the width of the
registers, 0.45; on Intel's 1. Machine: two cores with AVX-512; since 2026-11-22."""


# --- the default of a linear layer: graph/passes/library/linear_paths.py

SMALLEST = 8
"""Decides: which matrices get a layout. Smaller matrices are not worth a layout of their own. Machine: not recorded;
since 2026-11-21."""

SKINNY_ROWS = 16
"""Decides: plain operator or packed weights. Below so many rows reading the weights is what costs: the operator as it
is needs 0.3 to 1.0 times as long as the others in float32 while the weights stay in a core's caches, 1.0 to 1.8 times
as long where they do not (and there are more than FEWER_ROWS). Machine: not recorded; since 2026-11-21."""

FEWER_ROWS = 2
"""Decides: the same, of weights beyond the caches. Machine: not recorded; since 2026-11-21."""

FEW_CHANNELS = 64
"""Decides: 1x1 convolution: product or convolution. A convolution of fewer is a matter of memory: a product that need
not write the bias first takes 0.4 to 0.9 times as long as oneDNN's convolution in float32; with more, MKL's product
reaches 1.3 times the convolution's speed. Machine: not recorded; since 2026-11-21."""

CACHED = 2 << 20
"""Decides: which weights stay in the caches. Weights that stay in the caches (two cores have 4 MiB). Machine: not
recorded; since 2026-11-21."""

LARGEST_TWICE = 32 << 20
"""Decides: which matrices are laid out twice. Bytes: a larger matrix is not laid out twice (for the number of rows
that usually comes, and for any other). Machine: not recorded; since 2026-11-22."""


# --- products by oneDNN in training: graph/passes/library/onednn_gemm.py

LEAST_ONEDNN_WORK = 1 << 21
"""Decides: oneDNN or eager's library. Multiplications: of fewer a call's overhead is the larger part. Machine: not
recorded; since 2026-11-22."""

LEAST_ONEDNN_SIZE = 8
"""Decides: oneDNN or eager's library. Sizes below which another layout costs more than the product (3072x1024x2 takes
0.35 ms as it is, 0.6 with oneDNN). Machine: not recorded; since 2026-11-21."""


# --- depthwise gradients: graph/passes/library/depthwise_gradients.py

MATRICES = 256
"""Decides: loops or the library. About as many matrices of sums the library makes, whatever the shape (measured: 247
to 257). Machine: not recorded; since 2026-11-21."""

MOST_KEPT_BYTES = 32 * 1024 * 1024
"""Decides: loops or the library. The C library maps larger blocks anew each time, so that all of their pages are made
again. Machine: not recorded; since 2026-11-21."""


# --- products of one input: graph/passes/parameters/merge_linear.py

MOST_MERGED_ROWS = 512
"""Decides: one product or several. With so many rows the layers are a few percent quicker together, with 128 rows
1.15 to 1.25 times as quick, with 16 rows 1.5 to 2 times, with one 2 to 2.3 times (float32, 512 to 768 inputs and
outputs); above, they cost the same. Products in half precision are shorter, and gain more. Machine: not recorded;
since 2026-11-21."""

LEAST_MERGED_WORK = 1 << 16
"""Decides: one product or several. Multiplications: with less (12 layers of width 128 on one token) one thread was
10% slower, two threads 5% quicker. Machine: not recorded; since 2026-11-21."""


# --- what is computed from parameters: graph/passes/parameters/freeze.py

MOST_GROWTH = 2
"""Decides: what is kept. Machine: not recorded; since 2026-11-21."""

SMALL = 1 << 20
"""Decides: what is kept. A value may take MOST_GROWTH times the bytes of the parameters that it comes from; a value
of SMALL bytes may always be kept. Machine: not recorded; since 2026-11-21."""


# --- packed convolutions: graph/passes/parameters/pack.py

LEAST_DEPTHWISE_CHANNELS = 8
"""Decides: loops or the library. Machine: not recorded; since 2026-11-21."""

LARGEST_DEPTHWISE_WINDOW = 25
"""Decides: loops or the library. Depthwise convolutions with at least so many channels and at most so large a window
are left to loops. Machine: not recorded; since 2026-11-21."""


# --- attention as products and loops: graph/passes/attention/short_attention.py

MOST_SHORT_WORK = 1 << 18
"""Decides: loops or the library, of known sizes. Multiplications of queries by keys. Twelve heads of 64 with one
query take 4 to 30 us for up to 32 keys where the operator takes 20 to 40 (float32; 70 to 200 in bfloat16), 45 and 56
with 128 keys; the advantage goes down with more. Machine: not recorded; since 2026-11-22."""

MOST_GPU_QUERIES, MOST_GPU_KEYS, MOST_GPU_WORK = 256, 1024, 3 << 27
"""Decides: a kernel of ours or the library, of known sizes, on a GPU. Queries and keys of a head; multiplications of
all queries by keys. In bfloat16, us of the library and of ours: 1x16 heads of 16x16x128: 6.7 and 2.4; of
16x1024x128: 18.0 and 12.5; 4x16 of 64x64x64: 6.3 and 2.8; 8x16 of 200x200x64: 11.5 and 9.1; 16x12 of 256x256x64: 13.8
and 16.0. Machine: H100, torch 2.11, 20 calls in a CUDA graph; 2026-11-25."""

MOST_WHOLE_KEYS, LEAST_GPU_QUERIES = 512, 72
"""Decides: the same. Of more keys, a softmax of fewer rows (queries of all heads) is cut into parts."""


# --- gradients of attention: graph/passes/attention/attention_backward.py

MOST_PROBABILITY_BYTES = 8 * 1024 * 1024
"""Decides: five products or the library. Larger matrices of probabilities stay with the fused operator, which never
holds one. Machine: not recorded; since 2026-11-21."""


# --- products of halves in float32: graph/passes/precision/half_products.py

HALVES = {torch.bfloat16: 31e-12, torch.float16: 97e-12}
"""Decides: whether a product is widened. Seconds that a multiplication takes longer than one in float32, on the
machine above (two threads). Machine: two cores with AVX-512; since 2026-11-22."""

CONVERSION = 0.25e-9
"""Decides: whether a product is widened. Seconds to write one element in the other precision. Machine: two cores with
AVX-512; since 2026-11-22."""


# --- padding: graph/passes/layout/pad_products.py

RATES = {torch.float16: (500e12, 130e12), torch.bfloat16: (500e12, 130e12)}
"""Decides: whether a product is padded. Operations a second of an aligned product and of one that is not, measured on
an H200 (bfloat16, 4096x4095x4097: 0.28 ms padded, 1.08 ms as it is). Products in float32 run without tensor cores
unless the program allows TF32, and alignment matters little to them. Machine: H200; since 2026-11-22."""

BANDWIDTH = 3e12
"""Decides: whether a product is padded. Bytes a second of the copies. Machine: not recorded; since 2026-11-22."""

LAUNCH = 4e-6
"""Decides: whether a product is padded. Seconds that one more kernel costs. Machine: not recorded; since
2026-11-22."""


# --- layout: graph/passes/layout/channels_last.py

LEAST_CONVOLUTIONS = 2
"""Decides: whether images are channels-last. A single convolution does not pay for the conversions around it.
Machine: not recorded; since 2026-11-21."""
