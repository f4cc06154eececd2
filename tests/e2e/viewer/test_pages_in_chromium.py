"""Every page in a real browser: no script fails, axe finds nothing, it fits a narrow screen, keys and charts work."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from ratchet.types import SteeringAction
from stack.ports import free_port
from store import steering
from store.database import Database
from store.schema import RolloutTable
from store.steering import Request
from tests.integration.viewer.filled_store import FilledRun, fill_run
from tests.integration.viewer.test_pages import pages_of
from viewer.app import ViewerServer
from viewer.settings import ViewerSettings
from viewer.static_export import PageExporter


@pytest.fixture
async def filled(database: Database, model: Path) -> FilledRun:
    return await fill_run(database, "shop-run", model)


@pytest.fixture
async def address(database: Database, filled: FilledRun) -> AsyncIterator[str]:
    settings = ViewerSettings(database.url, port=free_port(), temporal_ui="http://127.0.0.1:8233")
    server = ViewerServer(settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield settings.address
    server.should_exit = True
    await serving


def axe_script() -> str:
    import axe_playwright_python

    return next(Path(axe_playwright_python.__file__).parent.glob("**/axe.min.js")).read_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_nothing(address: str, page: Page, filled: FilledRun, theme: str) -> None:
    await page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    script = axe_script()
    found = []
    for path in pages_of(filled):
        await page.goto(address + path)
        await page.evaluate(script)  # by the debugger's protocol, because the pages' policy lets no foreign script in
        result = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [
            f"{path}: {one['id']}: {one['nodes'][0]['html'][:160]} {one['nodes'][0]['failureSummary'][:200]}"
            for one in result["violations"]
        ]
    assert not found, "\n".join(found)


async def test_pages_fit_a_narrow_screen(address: str, page: Page, filled: FilledRun) -> None:
    await page.set_viewport_size({"width": 400, "height": 800})
    for path in pages_of(filled):
        await page.goto(address + path)
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 400, f"{path} is {wide} px wide"


async def test_a_click_on_a_point_of_a_chart_opens_its_step(address: str, page: Page, filled: FilledRun) -> None:
    await page.goto(f"{address}/runs/{filled.run_id}")
    chart = page.locator("[data-chart]", has_text="Entropy").locator(".u-over")
    await expect(chart).to_be_visible()
    box = await chart.bounding_box()
    assert box is not None
    await chart.hover(position={"x": 3, "y": box["height"] / 2})
    await chart.click(position={"x": 3, "y": box["height"] / 2})
    await page.wait_for_url(f"**/runs/{filled.run_id}/steps/1")


async def test_a_mark_on_a_curve_leads_to_what_was_asked(
    address: str, page: Page, filled: FilledRun, database: Database
) -> None:
    async with database.begin() as connection:
        request = Request(filled.run_id, "1", "anna@desk", "too fast")
        await steering.record(connection, request, SteeringAction.SET, "training.learning_rate", 1e-3, 1e-4, 2)
    await page.goto(f"{address}/runs/{filled.run_id}")
    chart = page.locator("[data-chart]", has_text="Entropy")
    mark = chart.locator(".mark-request")
    said = await mark.get_attribute("title")
    assert said is not None and "anna@desk asked: set training.learning_rate: 0.001 → 0.0001, from step 2 on" in said
    over, line = await chart.locator(".u-over").bounding_box(), await mark.bounding_box()
    assert over is not None and line is not None
    assert abs(line["x"] + line["width"] / 2 - over["x"] - over["width"] / 2) < 2, "step 2 of 1 to 3 is in the middle"
    await mark.click(position={"x": 5, "y": 5})
    await page.wait_for_url(f"**/runs/{filled.run_id}/steering#request-*")
    await expect(page.locator("tr.target")).to_contain_text("too fast")


async def test_keys_move_between_items_and_pages(address: str, page: Page, filled: FilledRun) -> None:
    await page.goto(f"{address}/rollouts/{filled.solved}")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(page.locator("article.turn.current h3")).to_contain_text("Turn 2")
    await page.keyboard.press("k")
    await expect(page.locator("article.turn.current h3")).to_contain_text("Turn 1")
    await page.keyboard.press("n")
    await page.wait_for_url(f"**/rollouts/{filled.unsolved}")
    await page.keyboard.press("/")
    await page.keyboard.type(f"{filled.failed}")
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**/rollouts/{filled.failed}")


async def test_a_running_rollout_is_shown_as_it_goes_on(
    address: str,
    page: Page,
    filled: FilledRun,
    database: Database,
) -> None:
    await page.goto(f"{address}/rollouts/{filled.running}")
    await expect(page.locator("h1 .badge")).to_have_text("agent works")
    await page.evaluate("window.isSamePage = true")
    async with database.begin() as connection:
        await connection.execute(
            RolloutTable.__table__.update()
            .where(RolloutTable.id == filled.running)
            .values(outcome="cancelled", outcome_reason="by a test")
        )
    await expect(page.locator("h1 .badge")).to_have_text("cancelled", timeout=15_000)
    await expect(page.locator(".why-box")).to_contain_text("by a test")
    assert await page.evaluate("window.isSamePage"), "the page was not loaded again"


async def test_the_theme_is_kept(address: str, page: Page) -> None:
    await page.emulate_media(color_scheme="light")
    await page.goto(f"{address}/runs")
    await page.click("#theme")
    await page.goto(f"{address}/rollouts")
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_an_export_opens_from_files(
    page: Page,
    filled: FilledRun,
    database: Database,
    tmp_path: Path,
) -> None:
    out = tmp_path / "export"
    await PageExporter(ViewerSettings(database.url), out).export_run(filled.run_id, 100)
    await page.goto(f"file://{out}/index.html")
    await page.wait_for_url("**/shop-run.html")
    await expect(page.locator("[data-chart] .u-over").first).to_be_visible()
    await page.locator("table.list a", has_text="1").last.click()
    await page.go_back()
    await page.goto(f"file://{out}/rollouts/{filled.solved}.html")
    await expect(page.locator("article.turn").first).to_be_visible()
