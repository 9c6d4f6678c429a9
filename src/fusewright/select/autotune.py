"""What `max_autotune` measures on a GPU: products against the library's operators, and the block sizes of other
kernels.

Takes a scheduled plan; gives the plan with the kernels that won in place of library calls, and the block sizes that
won. Always holds: each question (select/candidates.py) is asked once for all places of the graph that have it; what was
not asked stays as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.base.thresholds import LEAST_TUNED_BYTES, LEAST_TUNED_WORK, SKINNY
from fusewright.codegen.analysis import analyse
from fusewright.codegen.device_kernel import Processor, Unsupported
from fusewright.codegen.signature import signature
from fusewright.codegen.triton.gemm import takes_copies
from fusewright.codegen.triton.gemm_tiles import Computing, ProductShape, ProductTile, product_tiles
from fusewright.codegen.triton.module import DEPENDENT_ARCH
from fusewright.codegen.triton.tiles import Tile, choose, neighbours, power_of_two
from fusewright.loops.ir import Buffer
from fusewright.schedule.expressions import survey
from fusewright.schedule.plan import Kernel, Operand, Plan, Product, RunKernel, Step
from fusewright.select import prologues, replacement, sites, variants
from fusewright.select.candidates import Answer, Budget, Candidate, Question
from fusewright.select.prologues import Producer
from fusewright.select.sites import Site
from fusewright.select.variants import Variant
from fusewright.sizes.expressions import free_symbols

MOST_TILES = 8
"""Candidates for a product, beside the library."""
MOST_COMPUTING_TILES = 5
"""Candidates for a product that computes operands, for each choice of these."""
BULK_ARCH = 90
"""Compute capability from which GPUs have a copy engine for tensors (9.0)."""
CALL_DELAY = 1.5e-6
"""Seconds of a library call between kernels that start before those ahead of them have ended: it does not."""
# --- questions --------------------------------------------------------------------------------------------------------


def product_questions(plan: Plan, processor: Processor, device: torch.device) -> list[Question]:
    """One for each distinct product of the plan on that device."""
    claimed: set[int] = set()
    by_key: dict[str, list[Site]] = {}
    for site in reversed(sites.find(plan)):  # the last product that a kernel reads takes it over
        if site.work < LEAST_TUNED_WORK or site.result.device != device:
            continue
        if site.following in claimed:
            site = sites.alone(site)
        if site.following >= 0:
            claimed.add(site.following)
        by_key.setdefault(_site_key(plan, site), []).append(site)
    return [_product_question(plan, key, places, processor) for key, places in by_key.items()]


def _site_key(plan: Plan, site: Site) -> str:
    first = variants.variants(plan, site)[0]
    kernels = (*first.kernels, *_follower(plan, site).values())
    facts = (site.extern.target, [_structure(kernel) for kernel in kernels], site.result.shape, site.result.stride)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _follower(plan: Plan, site: Site) -> dict[str, Kernel]:
    """The kernel that reads the library's result and may become a part of the product, by its name, if there is one."""
    steps = (plan.steps[number] for number in sites.steps_of(site))
    return {step.kernel: plan.kernels[step.kernel] for step in steps if isinstance(step, RunKernel)}


def _results(site: Site, follower: Mapping[str, Kernel]) -> tuple[str, ...]:
    """The buffers that a candidate for the site must write."""
    written = {name for kernel in follower.values() for name in kernel.written}
    if site.kept or site.following < 0:
        written.add(site.result.name)
    return tuple(sorted(written))


def _extents(site: Site) -> tuple[int, int, int, int]:
    return site.batch, site.known_rows, site.columns, site.inner


def _title(site: Site) -> str:
    extents = _extents(site)[(0 if site.batch > 1 else 1) :]
    return f"{site.extern.name} {'x'.join(map(str, extents))}"


def _structure(kernel: Kernel) -> object:
    """What decides a kernel's speed. (On a GPU each buffer has memory of its own.)"""
    return signature(replace(kernel, inplace=()))


def _product_question(plan: Plan, key: str, places: list[Site], processor: Processor) -> Question:
    site = places[0]
    steps = tuple(plan.steps[number] for number in sites.steps_of(site))
    kernels = _follower(plan, site)
    candidates = [Candidate("library", steps, kernels, {})]
    whole, *_ = variants.variants(plan, site)
    product = whole.product.product
    assert product is not None
    channels = 0 if site.left.inner == product.k else _channels(site)
    made: dict[int, Variant | None] = {1: whole}
    sliceable = variants.split_k(plan, site, 2) is not None
    bulk = processor.arch >= BULK_ARCH and takes_copies(whole.product)
    shape = ProductShape(_extents(site), site.left.dtype, product.full, channels, sliceable, bulk)
    for tile, slices in product_tiles(shape, processor, MOST_TILES):
        if slices not in made:
            made[slices] = variants.split_k(plan, site, slices)
        variant = made[slices]
        if variant is None:
            continue
        runs = tuple(RunKernel(kernel.name) for kernel in variant.kernels)
        named = {kernel.name: kernel for kernel in variant.kernels}
        candidates.append(
            Candidate(
                f"{variant.name} {tile.text}", runs, named, {variant.product.name: tile}, variant, variant.buffers
            )
        )
    title = _title(site) + ("" if whole.name == "plain" else f" with {', '.join(_origins(kernels))}")
    weight, results, similar = (
        float(site.work) * len(places),
        _results(site, kernels),
        _shape_class(site, whole, kernels),
    )
    delay = CALL_DELAY if processor.arch >= DEPENDENT_ARCH and site.known_rows <= SKINNY else 0.0
    return Question(title, key, weight, tuple(candidates), results, _tolerance(product), tuple(places), similar, delay)


def _shape_class(site: Site, whole: Variant, kernels: Mapping[str, Kernel]) -> str:
    """All but the number of rows, of which only the next power of two counts."""
    factors = [(operand.dtype, str(operand.inner), len(operand.checks)) for operand in (site.left, site.right)]
    epilogue = [(origin, len(kernel.buffers)) for kernel in kernels.values() for origin in kernel.origins]
    facts = (
        site.extern.name, whole.name, site.batch, power_of_two(site.known_rows), site.columns, site.inner, factors,
        site.result.dtype,
        epilogue, site.kept, site.bias is not None,
    )  # fmt: skip
    return f"class {hashlib.sha256(repr(facts).encode()).hexdigest()}"


def _rounding(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)


def _tolerance(product: Product) -> float:
    return _rounding(product.left.dtype) if product.left.dtype is not torch.float32 or product.full else 2e-3


def _channels(site: Site) -> int:
    """Blocks of the inner dimension must divide this: the input channels of a convolution whose windows hold several
    pixels."""
    if "convolution" not in site.extern.name:
        return 0
    weight = site.extern.args[1]
    return 0 if weight.shape[2] == weight.shape[3] == 1 else int(weight.shape[1])


def _origins(kernels: Mapping[str, Kernel]) -> list[str]:
    return [origin for kernel in kernels.values() for origin in (kernel.origins or (kernel.name,))]


def tile_questions(plan: Plan, processor: Processor, device: torch.device) -> list[Question]:
    """One for each distinct kernel that touches much memory, products apart."""
    by_key: dict[str, list[Kernel]] = {}
    for kernel in plan.kernels.values():
        if (
            kernel.product is not None
            or kernel.sizes
            or _bytes(plan, kernel) < LEAST_TUNED_BYTES
            or _writes_outside(plan, kernel)
        ):
            continue
        if any(plan.buffers[name].device != device for name in kernel.buffers):
            continue
        by_key.setdefault(hashlib.sha256(repr(_structure(kernel)).encode()).hexdigest(), []).append(kernel)
    found = []
    for key, kernels in by_key.items():
        kernel = kernels[0]
        try:
            shape = analyse(kernel)
            first = choose(shape, processor)
            others = neighbours(shape, first)
        except Unsupported:
            continue
        steps = (RunKernel(kernel.name),)
        candidates = tuple(
            Candidate(tile.sizes, steps, {kernel.name: kernel}, {kernel.name: tile}) for tile in (first, *others)
        )
        weight = float(_bytes(plan, kernel)) * len(kernels)
        names = tuple(kernel.name for kernel in kernels)
        results = tuple(sorted(kernel.written))
        found.append(
            Question(
                f"blocks of {kernel.name}", key, weight, candidates, results, max(map(_rounding, kernel.dtypes)), names
            )
        )
    return found


def _bytes(plan: Plan, kernel: Kernel) -> int:
    return sum(_span_bytes(plan, name) for name in kernel.buffers)


def _span_bytes(plan: Plan, name: str) -> int:
    span = plan.buffers[name].span()
    return span * plan.buffers[name].element.itemsize if isinstance(span, int) else 0


def _writes_outside(plan: Plan, kernel: Kernel) -> bool:
    """Whether it changes memory that it also reads, so that it cannot simply be run again."""
    return any(plan.buffers[name].role not in ("temporary", "output") for name in kernel.written) or _accumulates(
        kernel
    )


def _accumulates(kernel: Kernel) -> bool:
    return any(
        getattr(statement, "mode", "write") != "write" for stage in kernel.stages for statement in stage.statements
    )


# --- tuning a plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tuned:
    """plan: with the winners in place; tiles: block sizes by kernel; answers: what was asked; unasked: questions that
    found no time."""

    plan: Plan
    tiles: dict[str, Tile | ProductTile]
    answers: tuple[Answer, ...]
    unasked: int

    @property
    def complete(self) -> bool:
        """Whether a later compile would ask the same."""
        return not self.unasked and not any(answer.short for answer in self.answers)

    @property
    def text(self) -> str:
        lines = [answer.text for answer in self.answers]
        lines += [f"  {name} was refused: {why}" for answer in self.answers for name, why in answer.refused.items()]
        return "\n".join(lines + ([f"{self.unasked} more: no time left"] if self.unasked else []))


def tune(plan: Plan, processor: Processor, device: torch.device, budget: Budget) -> Tuned:
    """The plan with what is quickest here."""
    asked = product_questions(plan, processor, device)
    answers = budget.ask(asked)
    choices = [choice for question in asked for choice in _at_places(plan, question, _winner(question, answers))]
    computing = prologue_questions(plan, choices, processor)
    choices = _with_prologues(computing, choices, budget.ask(computing), plan)
    grouped = group_questions(plan, choices, processor)
    decided = budget.ask(grouped)
    chosen = prologues.of_producers(plan, [producer for choice in choices for producer in choice.computed])
    tiles: dict[str, Tile | ProductTile] = {}
    merged: set[int] = set()
    for question in grouped:
        candidate = _winner(question, decided)
        if candidate is not None and candidate is not question.candidates[0]:
            (tile,) = candidate.tiles.values()
            for group in question.places:
                pair = variants.dual(plan, group) if candidate.name.startswith("dual ") else None
                kernel, following = pair or (variants.horizontal(group), -1)
                chosen.append(variants.of_group(group, kernel, following))
                tiles[kernel.name] = tile
                merged.update(site.step for site in group)
    for choice in choices:
        if choice.site.step not in merged and choice.variant is not None and choice.tile is not None:
            chosen.append(variants.of_variant(choice.site, choice.variant))
            tiles[choice.variant.product.name] = choice.tile
    budget.tuner.plan = plan = replacement.replaced(plan, chosen) if chosen else plan
    rest = tile_questions(plan, processor, device)
    more = budget.ask(rest)
    for question in rest:
        candidate = _winner(question, more)
        if candidate is not None and candidate is not question.candidates[0]:
            (tile,) = candidate.tiles.values()
            tiles.update(dict.fromkeys(question.places, tile))
    return Tuned(plan, tiles, tuple(budget.answers.values()), budget.unasked)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a site was found to be quickest by; no variant: the library. computed: what the product need not read from
    memory."""

    site: Site
    variant: Variant | None = None
    tile: Tile | ProductTile | None = None
    computed: tuple[Producer, ...] = ()


def _at_places(plan: Plan, question: Question, candidate: Candidate | None) -> list[Choice]:
    """The winner (if there was time for one) at each of the question's sites."""
    if candidate is None or candidate.variant is None:
        return [Choice(site) for site in question.places]
    (tile,) = candidate.tiles.values()
    name = candidate.variant.name
    made = (
        (site, next(v for v in variants.variants(plan, site, _counts(name)) if v.name == name))
        for site in question.places
    )
    return [Choice(site, variant, tile) for site, variant in made]


# --- computed operands ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A site as it was chosen, and what its operands may be computed from."""

    choice: Choice
    producers: tuple[Producer, ...]

    @property
    def options(self) -> list[tuple[Producer, ...]]:
        return [(producer,) for producer in self.producers] + ([self.producers] if len(self.producers) > 1 else [])


def prologue_questions(plan: Plan, choices: Sequence[Choice], processor: Processor) -> list[Question]:
    """One for each distinct product that alone reads what a pointwise kernel stores: as it was chosen, behind that
    kernel; or computing its operand itself."""
    taken = {choice.site.following for choice in choices if choice.variant is not None}
    used = prologues.uses(plan)
    offers = [(choice, found) for choice in choices if (found := prologues.producers(plan, choice.site, used, taken))]
    claimed = {producer.step for _, found in offers for producer in found}
    by_key: dict[str, list[Place]] = {}
    for choice, found in offers:
        if choice.site.following in claimed:  # one product's epilogue cannot be another one's prologue too
            choice = replace(choice, site=sites.alone(choice.site))
        variant = None if choice.variant is None else (choice.variant.name, choice.tile)
        alone = [(producer.side, _structure(producer.alone)) for producer in found]
        facts = ("prologue", _site_key(plan, choice.site), variant, alone)
        by_key.setdefault(hashlib.sha256(repr(facts).encode()).hexdigest(), []).append(Place(choice, found))
    questions = (_prologue_question(plan, key, places, processor) for key, places in by_key.items())
    return [question for question in questions if len(question.candidates) > 1]


def _prologue_question(plan: Plan, key: str, places: list[Place], processor: Processor) -> Question:
    place = places[0]
    choice, site = place.choice, place.choice.site
    numbers = sites.steps_of(site)
    before = tuple(RunKernel(producer.alone.name) for producer in place.producers)
    kernels = {producer.alone.name: producer.alone for producer in place.producers}
    follower = _follower(plan, site)
    if choice.variant is None:
        first = Candidate("apart", (*before, *(plan.steps[n] for n in numbers)), kernels | follower, {})
    else:
        assert choice.tile is not None
        runs = (*before, *(RunKernel(kernel.name) for kernel in choice.variant.kernels))
        named = kernels | {kernel.name: kernel for kernel in choice.variant.kernels}
        first = Candidate(
            "apart", runs, named, {choice.variant.product.name: choice.tile}, added=choice.variant.buffers
        )
    candidates = [first]
    product = variants.whole(site)
    for option in place.options:
        mine = prologues.computing(site, option)
        rest = [producer.alone for producer in place.producers if producer not in option]
        sliceable = variants.split_k(plan, mine, 2) is not None
        computing = _computing(plan, mine, option)
        shape = ProductShape(_extents(site), mine.left.dtype, product.full, 0, sliceable, computing=computing)
        for tile, slices in product_tiles(shape, processor, MOST_COMPUTING_TILES):
            variant = _variant(plan, mine, slices)
            if variant is not None:
                steps = tuple(RunKernel(kernel.name) for kernel in (*rest, *variant.kernels))
                named = {kernel.name: kernel for kernel in (*rest, *variant.kernels)}
                name = f"{_sides(option)} computed, {variant.name} {tile.text}"
                candidates.append(Candidate(name, steps, named, {variant.product.name: tile}, variant, variant.buffers))
    title = f"{_title(site)} behind {', '.join(_origins(kernels))}"
    weight = float(site.work) * len(places)
    return Question(title, key, weight, tuple(candidates), _results(site, follower), _tolerance(product), tuple(places))


def _variant(plan: Plan, site: Site, slices: int) -> Variant | None:
    return variants.variants(plan, site)[0] if slices == 1 else variants.split_k(plan, site, slices)


def _sides(option: Sequence[Producer]) -> str:
    return " and ".join(producer.side for producer in option)


def _computing(plan: Plan, site: Site, option: Sequence[Producer]) -> Computing:
    """What the site computes for an element of its operands."""

    def loaded(operand: Operand) -> int:
        if operand.value is None:
            return operand.dtype.itemsize
        k = sites.inner_symbol(site.inner)
        return sum(load.dtype.itemsize for load in survey([operand.value]).loads if k in free_symbols(load.index))

    def operations(operand: Operand) -> int:
        return 0 if operand.value is None else survey([operand.value]).nodes

    saved = sum(_span_bytes(plan, producer.buffer) for producer in option)
    return Computing(operations(site.left), operations(site.right), loaded(site.left), loaded(site.right), 2 * saved)


def _with_prologues(
    questions: Sequence[Question], choices: Sequence[Choice], answers: Mapping[str, Answer], plan: Plan
) -> list[Choice]:
    """The choices, with those that lost to products that compute their operands replaced."""
    better: dict[int, Choice] = {}
    for question in questions:
        candidate = _winner(question, answers)
        if candidate is None or candidate.variant is None:
            continue
        (tile,) = candidate.tiles.values()
        for place in question.places:
            option = next(
                option for option in place.options if candidate.name.startswith(f"{_sides(option)} computed, ")
            )
            site = prologues.computing(place.choice.site, option)
            name = candidate.variant.name
            variant = next(v for v in variants.variants(plan, site, _counts(name)) if v.name == name)
            better[site.step] = Choice(site, variant, tile, option)
    return [better.get(choice.site.step, choice) for choice in choices]


# --- products of one matrix -------------------------------------------------------------------------------------------


def group_questions(plan: Plan, choices: Sequence[Choice], processor: Processor) -> list[Question]:
    """One for each distinct group of products that can run side by side: as they were chosen, as one kernel, or as one
    with the kernel that reads their results. What a product computes of its operands stays as it was chosen."""
    by_step = {choice.site.step: choice for choice in choices if not choice.computed}
    by_key: dict[str, list[tuple[Site, ...]]] = {}
    for group in variants.groups(plan, [by_step[step].site for step in sorted(by_step)]):
        members = [by_step[site.step] for site in group]
        before = [
            (None if m.variant is None else (m.variant.name, m.tile), _follower_signature(plan, m.site))
            for m in members
        ]
        pair = _pair(plan, group, choices)
        facts = (
            signature(variants.horizontal(group)),
            pair and signature(pair[0]),
            before,
            [site.extern.target for site in group],
            group[0].result.shape,
        )
        by_key.setdefault(hashlib.sha256(repr(facts).encode()).hexdigest(), []).append(group)
    return [_group_question(plan, key, places, choices, processor) for key, places in by_key.items()]


def _pair(plan: Plan, group: Sequence[Site], choices: Sequence[Choice]) -> tuple[Kernel, int] | None:
    """The group's dual product, where it is worth a question (few rows wait for memory and for each other) and no other
    product has taken the kernel."""
    pair = variants.dual(plan, group) if group[0].known_rows <= SKINNY else None
    own = {site.step for site in group}
    for choice in choices if pair is not None else ():
        others = {producer.step for producer in choice.computed}
        if choice.variant is not None and choice.site.step not in own:
            others.add(choice.site.following)
        if pair[1] in others:  # type: ignore[index]
            return None
    return pair


def _follower_signature(plan: Plan, site: Site) -> object:
    step = plan.steps[site.following] if site.following >= 0 else None
    return _structure(plan.kernels[step.kernel]) if isinstance(step, RunKernel) else None


def _group_question(
    plan: Plan,
    key: str,
    places: list[tuple[Site, ...]],
    choices: Sequence[Choice],
    processor: Processor,
) -> Question:
    group, by_step = places[0], {choice.site.step: choice for choice in choices}
    apart: list[tuple[int, tuple[Step, ...]]] = []
    kernels: dict[str, Kernel] = {}
    tiles: dict[str, Tile | ProductTile] = {}
    added: list[Buffer] = []
    followers: list[tuple[int, Step]] = []
    results: set[str] = set()
    for site in group:
        choice = by_step[site.step]
        numbers = sites.steps_of(site)
        results.add(site.result.name)
        for number in numbers[1:]:
            step = plan.steps[number]
            assert isinstance(step, RunKernel)
            followers.append((number, step))
            results |= plan.kernels[step.kernel].written
        if choice.variant is None:
            apart += [(number, (plan.steps[number],)) for number in numbers]
            continue
        apart.append((numbers[-1], tuple(RunKernel(kernel.name) for kernel in choice.variant.kernels)))
        kernels.update({kernel.name: kernel for kernel in choice.variant.kernels})
        added += choice.variant.buffers
        assert choice.tile is not None
        tiles[choice.variant.product.name] = choice.tile
        if not site.kept and site.following >= 0:
            results.discard(site.result.name)
    after = {step.kernel: plan.kernels[step.kernel] for _, step in followers if isinstance(step, RunKernel)}
    steps = tuple(step for _, some in sorted(apart, key=lambda item: item[0]) for step in some)
    run = {
        step.kernel: kernels.get(step.kernel) or plan.kernels[step.kernel]
        for step in steps
        if isinstance(step, RunKernel)
    }
    first = Candidate("apart", steps, run, tiles, added=tuple(added))
    kernel = variants.horizontal(group)
    product = kernel.product
    assert product is not None
    site = group[0]
    candidates = [first]
    extents = (len(group), site.known_rows, site.columns, site.inner)
    runs = (RunKernel(kernel.name), *(step for _, step in sorted(followers, key=lambda item: item[0])))
    shape = ProductShape(extents, site.left.dtype, product.full, sliceable=False)
    for tile, _ in product_tiles(shape, processor, MOST_TILES):
        candidates.append(
            Candidate(f"horizontal {tile.text}", runs, after | {kernel.name: kernel}, {kernel.name: tile})
        )
    pair = _pair(plan, group, choices)
    if pair is not None:
        joined, _ = pair
        results -= {site.result.name for site in group}
        shape = replace(shape, extents=(1, *extents[1:]), rights=len(group))
        for tile, _ in product_tiles(shape, processor, MOST_TILES):
            candidates.append(
                Candidate(f"dual {tile.text}", (RunKernel(joined.name),), {joined.name: joined}, {joined.name: tile})
            )
    title = f"{len(group)} products {site.rows}x{site.columns}x{site.inner} of one matrix"
    weight = float(site.work) * len(group) * len(places)
    return Question(title, key, weight, tuple(candidates), tuple(sorted(results)), _tolerance(product), tuple(places))


def _counts(name: str) -> tuple[int, ...]:
    """The slices in a variant's name."""
    first = name.split()[0]
    return (int(first),) if first.isdigit() else ()


def _winner(question: Question, answers: Mapping[str, Answer]) -> Candidate | None:
    answer = answers.get(question.key)
    if answer is None:
        return None
    return next(candidate for candidate in question.candidates if candidate.name == answer.winner)
