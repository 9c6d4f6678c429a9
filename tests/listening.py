"""What a compile says of its stages, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusewright.base import events


@contextmanager
def stage_texts(*stages: str) -> Iterator[list[str]]:
    """The texts of these stages of every compile inside, in order."""
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage in stages:
            texts.append(event.text())

    with events.STREAM.listening(listen):
        yield texts


@contextmanager
def kernel_names() -> Iterator[list[str]]:
    """The names of the kernels made inside, in order."""
    names: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.KernelMade):
            names.append(event.name)

    with events.STREAM.listening(listen):
        yield names


def products(kernels: list[str]) -> int:
    """How many of the kernels multiply matrices."""
    return sum(name.startswith("product_") for name in kernels)
