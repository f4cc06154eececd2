"""The viewer of a real stack: a newcomer watches rollouts while they run, and finds out why one got its reward."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from cli.console import say
from ratchet.config_sources import load_config
from stack.follow_run import start_run
from stack.parts import Stack

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run_id(stack: Stack, config_path: Path) -> str:
    """A run of three steps that has just been started."""
    return asyncio.run(start_run(stack, load_config(config_path), "seen", new=True, say=say))


def json_of(stack: Stack, path: str) -> dict[str, object]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(stack.viewer_address + path) as answer:
        return dict(json.load(answer))


async def test_a_newcomer_watches_a_run_and_asks_why(stack: Stack, run_id: str, page: Page) -> None:
    await page.goto(f"{stack.viewer_address}/runs")
    await page.get_by_role("link", name=run_id).click(timeout=60_000)
    await page.evaluate("window.isSamePage = true")
    await expect(page.locator("#live")).to_contain_text("agent works", timeout=300_000)
    await expect(page.locator("h1 .badge")).to_have_text("done", timeout=1_200_000)
    assert await page.evaluate("window.isSamePage"), "it was never loaded again"
    await expect(page.locator("[data-chart]", has_text="Reward").locator(".u-over").first).to_be_visible()

    await page.locator("table", has_text="Largest gap").locator("a").first.click()
    await expect(page.locator("h1")).to_contain_text(re.compile(r"Step \d"))
    await page.get_by_role("link", name=re.compile("whose ratios are furthest")).click()
    await page.locator("table", has_text="Furthest ratio").locator("a", has_text="turn").first.click()
    await expect(page.locator("article.turn.target .tool, article.turn.target .message").first).to_be_visible()
    await expect(page.locator(".why-box li").first).to_contain_text("Its reward is")
    await page.get_by_role("link", name="tokens").first.click()
    await expect(page.locator(".t.trained").first).to_be_visible()


async def test_the_export_of_a_real_rollout(stack: Stack, run_id: str, page: Page, tmp_path: Path) -> None:
    listed = json_of(stack, f"/rollouts.json?run={run_id}&outcome=graded")
    rollouts = listed["rollouts"]
    assert isinstance(rollouts, list)
    out = tmp_path / "export"
    command = [sys.executable, "-P", "-m", "cli.main", "view", str(rollouts[0]["id"]), "--export", str(out)]
    environment = {**os.environ, "RATCHET_HOME": str(stack.home)}
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, env=environment, check=True, timeout=120)
    await page.goto(f"file://{out}/rollouts/{rollouts[0]['id']}.html")
    await expect(page.locator("article.turn").first).to_be_visible()
