"""What the site does beyond MkDocs: files of the root become pages, and folders in the navigation list their pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""A page of the site → the file of the root that it is."""


def on_config(config: Any) -> Any:
    config.nav = listed(config.nav)
    return config


def listed(item: Any) -> Any:
    """The navigation with `folder/` as the pages of that folder, its README first."""
    if isinstance(item, list):
        return [listed(each) for each in item]
    if isinstance(item, dict):
        return {title: listed(each) for title, each in item.items()}
    if not item.endswith("/"):
        return item
    pages = sorted(path.name for path in (ROOT / "docs" / item).glob("*.md"))
    return [f"{item}{name}" for name in sorted(pages, key=lambda name: name != "README.md")]


def on_files(files: Files, config: Any) -> Files:
    for page, source in FROM_ROOT.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for page, source in FROM_ROOT.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return markdown
