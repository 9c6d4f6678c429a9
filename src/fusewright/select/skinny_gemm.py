"""Matrix products over a number of rows that is known at run time only: a kernel of ours for few rows beside the
library for many.

Takes a scheduled `Plan`; gives its `Site`s of that kind (`find`), and with kernels for some of them a plan in which
sizes decide which way runs (`beside`). Always holds: both ways write the same buffers, and each step of them has its
condition.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.base.records import replace
from fusewright.loops.externs import schema_name
from fusewright.schedule.plan import Kernel, Plan, RunExtern, RunKernel, Step
from fusewright.select.replacement import with_steps
from fusewright.select.sites import LEAST_INNER, MATRICES, Site, is_plain, steps_of, with_following
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim


def find(plan: Plan) -> list[Site]:
    """The plan's products of matrices over a number of rows that is not known, in order; with `most` where the extern
    says for how many rows it may be made otherwise."""
    found = []
    for number, step in enumerate(plan.steps):
        if not isinstance(step, RunExtern):
            continue
        skinny, extern = step.extern.skinny, step.extern
        if skinny is not None:
            extern = replace(extern, target=skinny.target, args=skinny.args, kwargs=(), skinny=None)
        describe = MATRICES.get(schema_name(extern.target) or "")
        site = None if describe is None or not is_plain(plan, extern, static=False) else describe(plan, number, extern)
        if site is not None and site.batch == 1 and site.inner >= LEAST_INNER and not isinstance(site.rows, int):
            most = 0 if skinny is None else skinny.most
            found.append(with_following(plan, replace(site, extern=step.extern, most=most)))
    return found


def few_of(site: Site) -> Dim:
    """1 where a call has so few rows that the site's variant is for them, else 0. (With no rows there is nothing to do
    for either way.)"""
    return sizes.maximum(sizes.minimum(site.most + 1 - site.rows, 1), 0)


def beside(plan: Plan, chosen: Sequence[tuple[Site, Kernel]]) -> Plan:
    """The plan with these kernels beside the steps that they stand for (no two beside one step), of which only one way
    runs: the kernel for up to `Site.most` rows, the steps for more."""
    kernels = dict(plan.kernels) | {kernel.name: kernel for _, kernel in chosen}
    steps: list[Step] = list(plan.steps)
    before: dict[int, list[Step]] = {}
    for site, kernel in chosen:
        few = few_of(site)
        for number in steps_of(site):
            steps[number] = replace(steps[number], when=1 - few)
        at = steps_of(site)[-1]
        while _is_horizontal(plan.steps[at]):  # what the steps of a region read is there before the first of them
            at -= 1
        before.setdefault(at, []).append(RunKernel(kernel.name, when=few))
    made = [one for number, step in enumerate(steps) for one in (*before.get(number, ()), _without_few(step))]
    return with_steps(plan, kernels, dict(plan.buffers), made)


def _is_horizontal(step: Step) -> bool:
    return isinstance(step, RunKernel) and step.horizontal


def _without_few(step: Step) -> Step:
    """The step with what it says of few rows forgotten: whoever could use it has."""
    return (
        replace(step, extern=replace(step.extern, skinny=None))
        if isinstance(step, RunExtern) and step.extern.skinny is not None
        else step
    )
