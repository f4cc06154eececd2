"""An export opens without a server: its links are relative and lead to files of the export."""

import re
from html import unescape
from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from store.database import Database
from tests.integration.viewer.filled_store import FilledRun
from viewer.settings import ViewerSettings
from viewer.static_export import PageExporter


def broken_links(out: Path) -> list[str]:
    broken = []
    for page in out.rglob("*.html"):
        html = page.read_text()
        for target in re.findall(r'(?:href|src)="([^"]*)"', html):
            path, _, fragment = unescape(target).partition("#")
            if re.match(r"https?://|data:", path):
                continue
            file = page if not path else (page.parent / path).resolve()
            if not file.is_file() or (fragment and f'id="{fragment}"' not in file.read_text() and fragment != "tests"):
                broken.append(f"{page.relative_to(out)}: {target}")
    return broken


async def test_a_run(database: Database, filled: FilledRun, tmp_path: Path) -> None:
    out = tmp_path / "export"
    settings = ViewerSettings(database.url, temporal_ui="http://127.0.0.1:8233")
    await PageExporter(settings, out).export_run(filled.run_id, max_rollouts=100)
    assert broken_links(out) == []
    page = (out / f"runs/{filled.run_id}.html").read_text()
    tabs = page.partition('<nav class="tabs"')[2].partition("</nav>")[0]
    assert tabs.count("<a ") > 6 and "<span>" not in tabs, "each tab leads to a page"
    assert re.search(r"As of \d{4}-\d\d-\d\dT[\d:]+Z", page)
    assert not any("8233" in one.read_text() for one in out.rglob("*.html")), "readers have no Temporal"
    assert (out / f"runs/{filled.run_id}/steps/1.html").is_file()
    assert (out / f"groups/{filled.silent_group}.html").is_file()
    rollout = (out / f"rollouts/{filled.solved}.html").read_text()
    assert "htmx" not in rollout.replace("htmx-config", "") and "sse-connect" not in rollout
    assert (out / "index.html").is_file() and (out / "static/vendor/uPlot.LICENSE").is_file()


async def test_a_rollout(database: Database, filled: FilledRun, tmp_path: Path) -> None:
    out = tmp_path / "export"
    await PageExporter(ViewerSettings(database.url), out).export_rollout(filled.solved)
    assert broken_links(out) == []
    page = (out / f"rollouts/{filled.solved}.html").read_text()
    assert f"<span>{filled.run_id}</span>" in page, "the run's page is not exported, so its name is no link"


async def test_an_export_replaces_nothing(database: Database, filled: FilledRun, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not empty"):
        await PageExporter(ViewerSettings(database.url), tmp_path).export_rollout(filled.solved)
    with pytest.raises(ConfigError, match="there is no run 'none'"):
        await PageExporter(ViewerSettings(database.url), tmp_path / "new").export_run("none", 10)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]
