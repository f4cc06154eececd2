"""A run or a rollout as a folder of pages that opens without a server and can be published.

The pages are those of the viewer, asked for in this process. Links between exported pages become relative paths, and
links to pages that are not exported become plain text.
"""

import re
import shutil
from dataclasses import replace
from html import unescape
from os.path import relpath
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import httpx

from ratchet.errors import ConfigError
from ratchet.types import Purpose
from reads.curves import times_by_step
from reads.rollout_list import RolloutFilter, list_rollout_lines
from reads.rollouts import list_chains
from reads.runs import require_run
from viewer.app import create_viewer_app
from viewer.rendering import FOLDER
from viewer.routes.runs import NEWEST_STEPS
from viewer.settings import ViewerSettings

_PAGE_TOKENS = 1000
_ANCHOR = re.compile(r"<a\b(?P<attributes>[^>]*?)>(?P<text>.*?)</a>", re.DOTALL)
_LINK = re.compile(r'<link rel="(?:prev|next)" href="(?P<target>[^"]*)">')
_ATTRIBUTE = re.compile(r'\b(?P<name>href|src)="(?P<target>/[^"]*)"')
_TURN = re.compile(r"^(/rollouts/\d+)/turns/(\d+)$")
_STEP = re.compile(r"^/runs/[^/]+/steps/\d+$")
"""Its exported page has all rollouts and tokens, so the query does not count."""
_TOKENS = re.compile(r"^/rollouts/\d+/tokens$")


class PageExporter:
    """Writes pages below `out`. Each page's address is the key of `files`: path and query → file."""

    def __init__(self, settings: ViewerSettings, out: Path) -> None:
        self._app = create_viewer_app(replace(settings, token=None, temporal_ui="", trace_url="", is_export=True))
        self._out = out
        self.files: dict[str, Path] = {}

    async def export_rollout(self, rollout_id: int) -> None:
        """Write one rollout's page, its tokens and its logs; index.html leads to it."""
        async with self._app.router.lifespan_context(self._app):
            await self._plan_rollout(rollout_id)
            await self._write(f"/rollouts/{rollout_id}")

    async def export_run(self, run_id: str, max_rollouts: int) -> None:
        """Write the run's pages with its newest steps, and per purpose the newest rollouts, their groups and tasks."""
        async with self._app.router.lifespan_context(self._app):
            for page in ("", "/groups", "/tasks", "/costs", "/commands", "/versions"):  # not who asked what
                self._plan(f"/runs/{quote(run_id)}{page}")
            async with self._app.state.store.read() as connection:
                head = await require_run(connection, run_id)
                steps = await times_by_step(connection, run_id, head.step - NEWEST_STEPS + 1, head.step + 1)
                of_purpose = [RolloutFilter(run_id=run_id, purpose=purpose) for purpose in Purpose]
                lines = [await list_rollout_lines(connection, one, max_rollouts) for one in of_purpose]
            for line in (one for found in lines for one in found):
                await self._plan_rollout(line.id)
                self._plan(f"/tasks/{line.task_id}")
                if line.group_id is not None:
                    self._plan(f"/groups/{line.group_id}")
            for step in steps:
                self._plan(f"/runs/{quote(run_id)}/steps/{step}")
            await self._write(f"/runs/{quote(run_id)}")

    async def _plan_rollout(self, rollout_id: int) -> None:
        self._plan(f"/rollouts/{rollout_id}")
        async with self._app.state.store.read() as connection:
            chains = await list_chains(connection, rollout_id)
        for chain in chains:
            for first in range(0, chain.num_tokens, _PAGE_TOKENS):
                self._plan(f"/rollouts/{rollout_id}/tokens?chain={chain.no}&first={first}&colour=mask")

    def _plan(self, address: str) -> None:
        parts = urlsplit(address)
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", parts.query)
        self.files[address] = self._out / (parts.path.strip("/") + (f"_{name}" if name else "") + ".html")

    def _client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self._app)
        return httpx.AsyncClient(transport=transport, base_url="http://viewer", trust_env=False)

    async def _write(self, first: str) -> None:
        if self._out.exists() and any(self._out.iterdir()):
            raise ConfigError(f"{self._out} is not empty; name a new directory for the export")
        shutil.copytree(FOLDER / "static", self._out / "static", dirs_exist_ok=True)
        async with self._client() as client:
            for address, path in self.files.items():
                page = await client.get(address)
                if page.status_code != 200:
                    raise ConfigError(f"{address} cannot be exported: {page.status_code}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.relative(page.text, path))
        target = relpath(self.files[first], self._out)
        (self._out / "index.html").write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Ratchet</title>'
            f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{first}</a></html>'
        )

    def relative(self, html: str, path: Path) -> str:
        """Return the page with links that work from `path`; links to pages that are not exported lose their address."""

        def anchor(match: re.Match[str]) -> str:
            found = _ATTRIBUTE.search(match["attributes"])
            if found is None or self._file_of(unescape(found["target"])) is not None:
                return match[0]
            return f"<span>{match['text']}</span>"

        def address(match: re.Match[str]) -> str:
            file, fragment = self._file_of(unescape(match["target"])) or (None, "")
            if file is None:
                return match[0]
            same = file == path and fragment
            return f'{match["name"]}="{"" if same else relpath(file, path.parent)}{fragment}"'

        def link(match: re.Match[str]) -> str:
            return match[0] if self._file_of(unescape(match["target"])) is not None else ""

        return _ATTRIBUTE.sub(address, _ANCHOR.sub(anchor, _LINK.sub(link, html)))

    def _file_of(self, target: str) -> tuple[Path, str] | None:
        """Return the file behind an address and its fragment; None if it is not exported."""
        parts = urlsplit(target)
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        if parts.path.startswith("/static/"):
            return self._out / parts.path.lstrip("/"), fragment
        if turn := _TURN.match(parts.path):
            file = self.files.get(turn[1])
            return (file, f"#turn-{turn[2]}") if file is not None else None
        query = f"?{parts.query}" if parts.query else ""
        if _TOKENS.match(parts.path):
            asked = {"chain": "0", "first": "0", "colour": "mask"} | dict(parse_qsl(parts.query))
            query = "?chain={chain}&first={first}&colour={colour}".format_map(asked)
        if _STEP.match(parts.path):
            query = ""
        file = self.files.get(parts.path + query)
        return (file, fragment) if file is not None else None
