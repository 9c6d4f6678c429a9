"""The documentation: every Python example runs and prints what the page says, and the tables list what there is."""

from __future__ import annotations

import functools
import pkgutil
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusewright
from benchmarks import tables
from fusewright.backends import registry
from fusewright.base.options import MODES, OPTIONS, STANCES, VARIABLES
from fusewright.tools import logs

ROOT = Path(__file__).parents[1]
PROSE = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
BLOCK = re.compile(
    r"^(<!-- fragment -->\n\n)?```python\n(.*?)^```(?:\n\nThis prints:\n\n```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
"""A program, with what it prints. A fragment is shown, not run."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


EXAMPLES = [
    (page_id(page), number, text, output)
    for page in PROSE
    for number, (fragment, text, output) in enumerate(BLOCK.findall(page.read_text()))
    if not fragment
]
GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))["MADE"]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    fusewright.set_logs(**dict.fromkeys(logs.ARTIFACTS, False))
    registry._backends.pop("printing", None)


@pytest.mark.parametrize(
    ("page", "number", "text", "output"), EXAMPLES, ids=[f"{page}-{number}" for page, number, *_ in EXAMPLES]
)
def test_every_example_runs(
    page: str,
    number: int,
    text: str,
    output: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"{Path(page).name}_{number}.py"  # capture reads source lines
    file.write_text(text)
    exec(compile(text, str(file), "exec"), {"__name__": "__main__", "model": torch.nn.Linear(2, 2)})
    assert not output or capsys.readouterr().out == output


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_every_block_is_run_or_is_no_program(page: Path) -> None:
    text = page.read_text()
    languages = re.findall(r"^[ \t]*```+[ \t]*(\S+)", text, re.MULTILINE)
    assert set(languages) <= {"python", "sh", "text", "cpp"}, "a language that nobody knows, or `py`, would not be run"
    assert languages.count("python") == len(BLOCK.findall(text)), "an indented block is not run"
    marks = re.findall(r"^<!-- fragment -->$", text, re.MULTILINE)
    assert len(marks) == sum(bool(fragment) for fragment, *_ in BLOCK.findall(text)), "a mark without a block after it"


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first column (without its backquotes) → the others."""
    text = (ROOT / "docs" / page).read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"^\|.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert table is not None
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.group().splitlines()[2:]]
    return {row[0].strip("| `"): row[1:] for row in cells}


def test_tables_list_what_there_is() -> None:
    options = rows("compile.md", "### Options")
    assert list(options) == list(OPTIONS)
    for key, row in OPTIONS.items():
        assert options[key] == [row.type.__name__, f"`{row.default}`", row.meaning], key
    assert set(rows("compile.md", "### Modes")) == set(MODES)
    variables = rows("compile.md", "### Environment variables")
    assert {key: [row.meaning] for key, row in VARIABLES.items()} == variables
    assert {key: [meaning] for key, meaning in logs.ARTIFACTS.items()} == rows("explain.md", "## Logs")
    assert set(rows("backends.md", "# Backends")) == set(registry.BUILT_IN)
    treatment = (ROOT / "docs" / "compile.md").read_text()
    for name in (*STANCES, *(name for name in fusewright.__all__ if name.islower())):
        documented = any(
            f"`{name}" in page.read_text() or f"fusewright.{name}" in page.read_text() or f'"{name}"' in treatment
            for page in PROSE
            if page.name != "api.md"
        )
        assert documented, name


def test_each_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r": (\S+)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if page not in listed and f"{Path(page).parent}/" not in listed]


def test_the_reference_has_each_public_name_once() -> None:
    listed = re.findall(r"^::: fusewright\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(fusewright.__all__)


PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
PLACES = (ROOT, ROOT / "src" / "fusewright", ROOT / "docs")


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_paths_in_backquotes_exist(page: Path) -> None:
    missing = []
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        is_path = PATH.fullmatch(quoted) and quoted.endswith((".py", ".c", ".cpp", ".h", ".md", "/"))
        if is_path and "/" in quoted and not any((place / quoted).exists() for place in PLACES):
            missing.append(quoted)
    assert not missing, f"{page.name} names files that are not there: {missing}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_tests_in_backquotes_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    assert not [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]


def test_every_guarantee_names_its_test() -> None:
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if line.startswith("|")]
    bare = [row for row in rows if "`tests/" not in row and not row.startswith(("| what |", "|---"))]
    assert rows and not bare


NAME = re.compile(r"([A-Za-z_][\w.]*?)(?:\(.*\))?")
ELSEWHERE = {"CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE"}


@functools.cache
def vocabulary() -> frozenset[str]:
    """Every word of the tree, and every file's name."""
    folders = (ROOT / folder for folder in ("src", "csrc", "tests", "benchmarks", "examples"))
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".c", ".cpp", ".h")]
    texts = [file.read_text() for file in (*files, ROOT / "pyproject.toml") if file != Path(__file__)]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text)) | {file.name for file in files}


def exists(name: str) -> bool:
    if name.endswith((".py", ".c", ".cpp", ".h")):
        return name in vocabulary()
    if name in ELSEWHERE or all(word in vocabulary() for word in filter(None, name.split("."))):
        return True
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_names_in_backquotes_exist(page: Path) -> None:
    names = [found[1] for quoted in re.findall(r"`([^`\n]+)`", page.read_text()) if (found := NAME.fullmatch(quoted))]
    missing = [name for name in names if not exists(name)]
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_printed_from_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count("<!-- table:") == len(tables.PLACE.findall(text)) > 0
    assert tables.filled(text) == text, f"python -m benchmarks.tables writes {page} anew"


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    found = tables.result(path.stem)
    assert all(found[name] for name in ("machine", "date", "commit", "command", "rows"))
    assert any(f"<!-- table: {path.stem} -->" in (ROOT / page).read_text() for page in tables.PAGES), "on no page"


@pytest.mark.parametrize("folder", sorted(GENERATED))
def test_generated_pages_and_pictures_are_current(folder: str) -> None:
    found = {file.name: file.read_text() for file in (ROOT / "docs" / folder).iterdir()}
    assert found == GENERATED[folder](), "python docs/generate.py writes them anew"
