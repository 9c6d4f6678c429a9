"""`fusewright.report`: the page shows what happened, stands alone, escapes everything, and fits a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base import events
from fusewright.tools import cli, page, patching, plan_figures

OPTIONAL_END = {"td", "th", "tr", "p"}
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Raises on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag:
            assert self.open.pop() in OPTIONAL_END, tag
        self.open.pop()


def checked(html: str) -> str:
    """The page, which is well-formed, and leads nowhere else."""
    checker = Checker()
    checker.feed(html)
    assert not checker.open and all(address.startswith("#") for address in checker.addresses)
    assert "http" not in html and "url(" not in html and "@import" not in html
    return html


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(x))).softmax(-1)


def program() -> None:
    net = fusewright.compile(Net(), dynamic=False)
    with torch.no_grad():
        net(torch.randn(16, 64))
        net(torch.randn(8, 64))
    net(torch.randn(16, 64)).square().sum().backward()

    def branch(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line that breaks
            fusewright.graph_break("<script>alert('x')</script>")
        return x + 1

    fusewright.compile(branch, options={"speculate": False})(torch.ones(4))


@pytest.fixture(scope="module")
def html() -> str:
    with fusewright.report() as recording:
        program()
    return recording.html


def section(html: str, name: str) -> str:
    return unescape(html.split(f'<section id="{name}">', 1)[1].split("</section>", 1)[0])


def test_the_page_shows_what_happened(html: str) -> None:
    checked(html)
    breaks = section(html, "breaks")
    assert (
        "data-dependent-branch" in breaks
        and "if x.sum() > 0:  # the line that breaks" in breaks
        and "torch.where" in breaks
    )
    assert "L['x'].size()[0] was 16, is 8" in section(html, "recompiles")
    kernels = section(html, "kernels")
    assert (
        "softmax" in kernels
        and "define void @fw" in kernels
        and "return self.last(torch.relu" not in kernels.split("<pre>")[0]
    )
    assert (
        "forward</b>" in kernels
        and "backward</b>" in kernels
        and "KiB" in kernels
        and re.search(r"\d µs|\d ms", kernels)
    )
    assert "<svg" in section(html, "time") and "capture" in section(html, "time")
    assert "<svg" in section(html, "memory") and "peak" in section(html, "memory")
    assert "aten" in section(html, "graphs") or "softmax" in section(html, "graphs")


def test_each_version_shows_its_own_kernels() -> None:
    """Kernels of two versions have the same names."""
    with fusewright.report() as recording, torch.no_grad():
        f = fusewright.compile(lambda x: x.exp() + 1, dynamic=False, options={"disk_cache": False})
        for size in (301, 503):
            f(torch.ones(size))
    plans = section(recording.html, "kernels").split('<div class="card">')[1:]
    assert len(plans) == 2 and all(f"parallel o0 < {size}" in plan for size, plan in zip((301, 503), plans))


def test_texts_of_the_program_are_escaped(html: str) -> None:
    assert "<script" not in html and "&lt;script&gt;alert" in html


def test_light_and_dark_desktop_and_phone(html: str) -> None:
    assert "prefers-color-scheme:dark" in html and "color-scheme:light dark" in html
    assert 'name="viewport"' in html and "@media (max-width:640px)" in html


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(html: str, width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser")
    measure = (
        "<script>document.body.innerHTML = `wider by ${document.documentElement.scrollWidth - innerWidth}`</script>"
    )
    (tmp_path / "page.html").write_text(
        html.replace("<details", "<details open").replace("</body>", f"{measure}</body>")
    )
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"--window-size={width},900", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r"wider by (-?\d+)", done.stdout)
    assert found and int(found[1]) <= 0, done.stdout[:200] + done.stderr[-500:]


def test_an_empty_page_is_whole() -> None:
    assert "none" in checked(page.render(()))


def test_a_recording_ends_and_is_written_whatever_happens(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    before = list(events.STREAM.subscribers)
    with pytest.raises(KeyError), fusewright.report(path) as recording:
        fusewright.compile(lambda x: x + 1)(torch.ones(2))
        raise KeyError
    assert events.STREAM.subscribers == before
    count = len(recording.record)
    fusewright.compile(lambda x: x + 2)(torch.ones(2))
    recording.close()
    assert len(recording.record) == count and "lambda" in checked(path.read_text())


def test_notebooks_show_it_in_a_frame() -> None:
    report = fusewright.explain(lambda x: x.sin() * 2)(torch.ones(300))
    for shown in (report, fusewright.report()):
        frame = shown._repr_html_()
        assert frame.startswith("<iframe srcdoc=") and frame.count('"') == 4
        checked(unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]))  # type: ignore[index]
        if shown is not report:
            shown.close()


def loaded(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[plan_figures.PlanFigures]:
    seen: list[events.Event] = []
    with events.STREAM.listening(seen.append), torch.no_grad():
        fusewright.compile(f)(*inputs)
    return [plan_figures.figures(e.call_plan, e.plan) for e in seen if isinstance(e, events.PlanLoaded)]


def test_bytes_and_memory_of_a_plan() -> None:
    (plan,) = loaded(lambda x, w: torch.relu(x + 1) @ w, torch.randn(32, 64), torch.randn(64, 16))
    first, product = plan.steps
    assert first.is_kernel and first.moved == 2 * 32 * 64 * 4
    assert not product.is_kernel and product.moved == (32 * 64 + 64 * 16 + 32 * 16) * 4
    assert plan.peak == (32 * 64 + 32 * 16) * 4
    assert all(step.seconds is not None and step.seconds > 0 for step in plan.steps)


def test_measuring_runs_nothing_of_the_users_and_draws_no_number() -> None:
    calls: list[int] = []

    @torch.library.custom_op("fusewright_report::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    counted.register_fake(torch.empty_like)
    plans = loaded(lambda x: counted(x * 2) * 2, torch.ones(300))
    assert len(calls) == 1 and plans and all(step.seconds is None for plan in plans for step in plan.steps)
    state = torch.get_rng_state()
    x = torch.randn(300)
    torch.set_rng_state(state)
    loaded(lambda x: x * 2, torch.ones(300))
    assert torch.equal(torch.randn(300), x)
    index = loaded(
        lambda x, i: 7 // i + x, torch.ones(3), torch.ones(3, dtype=torch.long)
    )  # zeros do not pass its check
    assert index[0].steps


def test_bars_leave_out_the_time_between_compiles() -> None:
    def stage(at: float, seconds: float, function: str, name: str) -> tuple[float, events.Event]:
        return at, events.StageDone(function, name, str, seconds)

    record = [
        stage(10.5, 0.5, "f", "loops"),
        (11.0, events.Compiled("f", 1.0)),
        stage(101.0, 1.0, "g backward", "loops"),
        stage(202.0, 1.0, "g", "loops"),
        (203.0, events.Compiled("g", 2.0)),
    ]
    drawn = page.bars(record)
    assert [(bar.start, bar.end, bar.name) for bar in drawn if bar.depth == 0] == [
        (0.0, 1.0, "f"),
        (1.0, 2.0, "g backward"),
        (2.0, 4.0, "g"),
    ]
    assert all(0 <= bar.start <= bar.end <= 4 for bar in drawn) and len([bar for bar in drawn if bar.depth]) == 3


def test_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.base.options.replace_torch_compile", lambda: None)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.compile(lambda x: x.cos() * 5)(torch.ones(9))\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        cli.main(["report", "-o", str(tmp_path / "page.html"), str(program)])
    assert torch.compile is not patching._compile
    assert "program.py" in checked((tmp_path / "page.html").read_text())
