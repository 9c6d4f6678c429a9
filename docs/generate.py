"""Writes docs/breaks/, a page for each graph-break code, and docs/pictures/. `python docs/generate.py`"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from docs.pictures import pictures  # noqa: E402
from fusewright.base.break_catalogue import BREAKS  # noqa: E402


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    rows = [f"| [{code}]({code}.md) | {cause} |" for code, (cause, _) in sorted(BREAKS.items())]
    index = "# Graph breaks by code\n\nGenerated from the catalogue. [explain](../explain.md) shows yours.\n\n"
    made = {"README.md": index + "| code | cause |\n|---|---|\n" + "\n".join(rows) + "\n"}
    for code, (cause, remedy) in BREAKS.items():
        made[f"{code}.md"] = (
            f"# {code}\n\n**Cause:** {cause}.\n\n**Remedy:** {remedy}.\n\n"
            "The program's results are the same with the break; it costs speed. "
            "[All codes](README.md), [finding the line](../explain.md).\n"
        )
    return made


MADE = {"breaks": pages, "pictures": pictures}
"""What stands in each folder that is generated whole."""


if __name__ == "__main__":
    for folder, texts in MADE.items():
        made = texts()
        (DOCS / folder).mkdir(exist_ok=True)
        for name, text in made.items():
            (DOCS / folder / name).write_text(text)
        for file in (DOCS / folder).iterdir():
            if file.name not in made:
                file.unlink()
