"""Goldens as text: a folder of files of scenarios, `## heading`, what goes in, `-->`, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path


def _parts(file: Path) -> Iterator[tuple[str, str, str]]:
    for part in file.read_text().split("## ")[1:]:
        heading, text = part.split("\n", 1)
        before, _, after = text.partition("-->\n")
        yield heading, before.strip(), after.strip()


def scenarios(folder: Path) -> dict[str, tuple[str, str]]:
    """By heading: what goes in, and what comes out."""
    return {
        heading: (before, after) for file in sorted(folder.glob("*.txt")) for heading, before, after in _parts(file)
    }


def write(folder: Path, result: Callable[[str, str], str]) -> None:
    """Writes what comes out anew: result(heading, what goes in)."""
    for file in folder.glob("*.txt"):
        written = [f"## {heading}\n{text}\n-->\n{result(heading, text)}\n" for heading, text, _ in _parts(file)]
        file.write_text("\n".join(written))
