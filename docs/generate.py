"""Writes docs/breaks/: a page for each graph-break code, from the catalogue. `python docs/generate.py`"""

from __future__ import annotations

from pathlib import Path

from fusewright.base.break_catalogue import BREAKS

FOLDER = Path(__file__).parent / "breaks"


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


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    for page in FOLDER.glob("*.md"):
        if page.name not in pages():
            page.unlink()
