"""Matrix products on a CPU by kernels of our own: where they take the library's place (of few rows, or of any where
there is to be no library), and a kernel of one to be tried.

Takes a scheduled plan and what says whether a product is quicker by a kernel of ours; gives the plan with such kernels
in place, each with the pointwise kernel that follows it. Always holds: what is computed stays the same sums in float32
(in another order); sizes but the number of rows are numbers, and where any number of rows may come, both ways are in
the plan; a matrix whose inner dimension does not lie side by side stays with the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusewright.base.records import replace
from fusewright.base.thresholds import (
    LEAST_QUERIES,
    LITTLE_WORK,
    MOST_ATTENTION_WORK,
    MOST_ROWS,
    MOST_ROWS_BESIDE_HALVES,
    MOST_ROWS_BESIDE_TILES,
    MOST_ROWS_OF_FLOATS,
)
from fusewright.codegen.call_plan import build_call_plan
from fusewright.codegen.llvm import compile_kernels
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.module import host_target
from fusewright.codegen.llvm.templates.attention import is_supported as is_attention
from fusewright.codegen.llvm.templates.attention_block import is_supported as is_attention_block
from fusewright.codegen.llvm.templates.skinny_gemm import is_supported
from fusewright.graph.passes.library.linear_paths import Linear
from fusewright.loops.ir import Buffer, BufferRef, Extern, Output
from fusewright.runtime import launch
from fusewright.runtime.machine_code import load_code
from fusewright.schedule.driver import with_memory
from fusewright.schedule.plan import UNBOUNDED, Attention, Kernel, Plan, RunExtern, RunKernel
from fusewright.select import attention, replacement, sites, skinny_gemm, variants
from fusewright.select.replacement import Replacement
from fusewright.select.sites import Site
from fusewright.select.variants import Variant
from fusewright.sizes.estimate import NO_EXAMPLES, estimate
from fusewright.sizes.expressions import Expr

TILES = {torch.bfloat16: "+amx-bf16", torch.float16: "+amx-fp16"}
"""What a processor has that multiplies tiles of these."""


def is_likely_quick(linear: Linear, target: Target | None = None) -> bool:
    """Whether a kernel of ours is likely at least as quick as the library's best way. `target`: the processor, this one
    by default."""
    target, rows = target or host_target(), linear.rows
    if rows is None or not is_possible_for(linear, target):
        return False
    return rows <= _quick_rows(linear.dtype, target) or linear.work <= LITTLE_WORK


def most_rows(linear: Linear, target: Target | None = None) -> int:
    """For how many rows a kernel of ours beside the library's is worth compiling, where any number may come and
    `linear.rows` is an example; 0 for none: where many rows usually come, few are rare."""
    target, rows = target or host_target(), linear.rows
    if rows is None or not is_possible_for(replace(linear, varies=False, rows=max(rows, 1)), target):
        return 0
    return max(_quick_rows(linear.dtype, target), min(MOST_ROWS, LITTLE_WORK // (linear.inner * linear.columns)))


def is_possible_for(linear: Linear, target: Target | None = None) -> bool:
    """Whether a kernel of ours for the layer may be quick, on `target` (this processor by default)."""
    rows = linear.rows
    return not linear.varies and rows is not None and rows <= MOST_ROWS and has_kernel(linear, target)


def has_kernel(linear: Linear, target: Target | None = None) -> bool:
    """Whether a kernel of ours can compute the product, quick or not, on `target` (this processor by default)."""
    if linear.rows == 0 or linear.inner < sites.LEAST_INNER or linear.columns == 0:
        return False
    return linear.dtype in sites.DTYPES and (target or host_target()).multiplies_adds


def _quick_rows(dtype: torch.dtype, target: Target) -> int:
    """Rows up to which a kernel of ours is likely quick, however long they are."""
    if dtype is torch.float32:
        return MOST_ROWS_OF_FLOATS
    of_tiles, of_vectors = ("+amx-bf16", "+avx512bf16") if dtype is torch.bfloat16 else ("+amx-fp16", "+avx512fp16")
    features = target.features.split(",")
    return (
        MOST_ROWS_BESIDE_TILES
        if of_tiles in features
        else MOST_ROWS_BESIDE_HALVES
        if of_vectors in features
        else MOST_ROWS
    )


def with_generated_gemm(
    plan: Plan,
    takes: Callable[[Linear], bool],
    skinny_rows: Callable[[Linear], int] = most_rows,
    examples: Mapping[Expr, int] = NO_EXAMPLES,
    target: Target | None = None,
) -> Plan:
    """The plan with kernels of ours for the products for which `takes` says so, and beside those over any number of
    rows for as many as `skinny_rows` says (in their place where it says UNBOUNDED). examples: of the symbols of its
    sizes; target: the processor, this one by default."""
    target = target or host_target()
    chosen = _of_known_rows(plan, takes, target)
    plan = replacement.replaced(plan, chosen) if chosen else plan
    beside = _of_any_rows(plan, skinny_rows, examples, target)
    instead = [variants.of_variant(site, variant) for site, variant in beside if site.most == UNBOUNDED]
    if instead:
        plan = replacement.replaced(plan, instead)
        beside = _of_any_rows(plan, skinny_rows, examples, target)
    few = [(site, variant.product) for site, variant in beside]
    return skinny_gemm.beside(plan, few) if few else plan


def with_generated_attention(plan: Plan, target: Target | None = None, library: bool = True) -> Plan:
    """The plan with kernels of ours in place of the library's attention of many queries, and beside it over sizes that
    are not known. Without `library`: in its place wherever there is one."""
    target = target or host_target()
    if not library:
        sites = [site for site in attention.find(plan) if site.fits == 1]
        fitting = [(site, _best(site, target)) for site in sites]
        return attention.replaced(plan, [(site, many) for site, many in fitting if many is not None])
    many = [
        (site, True)
        for site in attention.find(plan)
        if site.is_known and is_quick_block(site.kernel, site.attention, target)
    ]
    plan = attention.replaced(plan, many) if many else plan
    unknown = [site for site in attention.find(plan) if not site.is_known and is_attention(site.attention, target)]
    return attention.beside(plan, unknown, MOST_ATTENTION_WORK) if unknown else plan


def _best(site: attention.Site, target: Target) -> bool | None:
    """Whether the site's kernel is for many queries at a time; None where there is no kernel."""
    axis = site.kernel.outer[2]
    few = isinstance(axis.extent, int) and axis.extent < LEAST_QUERIES
    by_row, by_block = is_attention(site.attention, target), is_attention_block(site.attention, axis, target)
    if not by_row and not by_block:
        return None
    return by_block and not (few and by_row)


def is_quick_block(kernel: Kernel, attention: Attention, target: Target) -> bool:
    """Whether attention over sizes that are known is quicker by a kernel for blocks of queries."""
    axis, of_tiles = kernel.outer[2], TILES.get(attention.query.dtype)
    if not isinstance(axis.extent, int) or axis.extent < LEAST_QUERIES or of_tiles in target.features.split(","):
        return False
    return is_attention_block(attention, axis, target)


def _of_any_rows(
    plan: Plan, skinny_rows: Callable[[Linear], int], examples: Mapping[Expr, int], target: Target
) -> list[tuple[Site, Variant]]:
    claimed: set[int] = set()
    chosen = []
    for site in reversed(skinny_gemm.find(plan)):
        if site.result.device.type != "cpu":
            continue
        site = replace(site, most=site.most or skinny_rows(described(site, examples)))
        variant = None if site.following < 0 or site.following in claimed else variants.fused(plan, site)
        if variant is None:
            site = sites.alone(site)
            variant = variants.plain(plan, site)
        product = variant.product.product
        if site.most > 0 and product is not None and is_supported(product, variant.product.outer, target):
            claimed.add(site.following)
            chosen.append((site, variant))
    return chosen


def _of_known_rows(plan: Plan, takes: Callable[[Linear], bool], target: Target) -> list[Replacement]:
    claimed: set[int] = set()
    chosen = []
    for site in reversed(sites.find(plan)):  # the last product that a kernel reads takes it over
        if (
            site.result.device.type != "cpu"
            or site.batch != 1
            or site.relayout is not None
            or not takes(described(site))
        ):
            continue
        variant = None if site.following < 0 or site.following in claimed else variants.fused(plan, site)
        if variant is None:
            site = sites.alone(site)
            variant = variants.plain(plan, site)
        product = variant.product.product
        if product is not None and is_supported(product, variant.product.outer, target):
            claimed.add(site.following)
            chosen.append(variants.of_variant(site, variant))
    return chosen


def described(site: Site, examples: Mapping[Expr, int] = NO_EXAMPLES) -> Linear:
    """The product as the passes that choose a way of the library's describe it."""
    by_rows = site.right.inner is sites.inner_symbol(site.inner)
    varies = not isinstance(site.rows, int)
    rows = estimate(site.rows, examples)
    return Linear(site.result.dtype, rows, site.inner, site.columns, site.bias is not None, by_rows, varies=varies)


def trial(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[], object]:
    """A call of the product alone. x: rows x inner; weight: columns x inner, contiguous. Raises ValueError where there
    is no kernel."""
    rows, columns = x.shape[0], weight.shape[0]
    device, dtype = x.device, linear.dtype
    named = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    buffers = {
        name: Buffer(name, tuple(given.shape), tuple(given.stride()), dtype, device, "input", position=position)
        for position, (name, given) in enumerate(named.items())
    }
    buffers["out"] = Buffer("out", (rows, columns), (columns, 1), dtype, device, "output")
    refs = {
        "x": BufferRef("x", (rows, linear.inner), (linear.inner, 1), 0, dtype),
        "weight": BufferRef("weight", (linear.inner, columns), (1, linear.inner), 0, dtype),
        "bias": BufferRef("bias", (columns,), (1,), 0, dtype),
    }
    order = ("x", "weight") if bias is None else ("bias", "x", "weight")
    target = torch.ops.aten.mm.default if bias is None else torch.ops.aten.addmm.default
    extern = Extern(str(target), target, tuple(refs[name] for name in order), (), ("out",), "out")
    plan = Plan({}, buffers, (RunExtern(extern),), tuple(named), (Output("buffer", "out"),))
    plan = with_memory(with_generated_gemm(plan, lambda described: True), own_bytes=None)
    if not isinstance(plan.steps[0], RunKernel):
        raise ValueError("no kernel for this product")
    module = compile_kernels(list(plan.kernels.values()))
    (code,) = module.codes.values()
    loaded = load_code(module.object, [code.symbol])
    call_plan = build_call_plan(plan, module.codes, name="generated GEMM", available=launch.is_available)
    native = launch.load(call_plan, {code.key: loaded.addresses[code.symbol]}, owner=loaded.owner)
    given = tuple(named.values())
    return lambda: native(*given)
