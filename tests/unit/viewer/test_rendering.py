"""Texts of agents cannot become markup, numbers are short, and links to Temporal are complete."""

import threading
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from jinja2 import DictLoader
from markupsafe import escape

from reads.vitals import clock_time
from viewer.app import create_viewer_app
from viewer.rendering import _data_json, ago, highlighted, make_environment, quoted, short_number, workflow_link
from viewer.settings import ViewerSettings

MARKUP = "</script><script>alert(1)</script>"


def test_data_cannot_end_its_script_element() -> None:
    assert "<" not in _data_json({"title": MARKUP})


def test_highlighted_code_is_escaped() -> None:
    for language, path in (("bash", ""), ("", "a.html"), ("", "a.unknown"), ("", "")):
        assert "<script" not in highlighted(MARKUP, language, path), (language, path)
    assert "<span" in highlighted("echo $HOME", "bash") and "<span" in highlighted("def f(): ...", "", "/w/a.py")


@pytest.mark.parametrize(("language", "path"), [("bash", ""), ("", "a.py"), ("", "a.html"), ("json", "")])
def test_long_code_is_only_escaped(language: str, path: str) -> None:
    """Pygments reads a here-document without an end once for each of its letters."""
    text = "<<" + "".join(map(chr, range(0x4E00, 0x4E00 + 5000)))
    assert highlighted(text, language, path) == escape(text)


@pytest.mark.parametrize("path", ["Makefile", "a.thrift", "a.md", "a", ""])
def test_an_agent_cannot_choose_any_lexer(path: str) -> None:
    assert highlighted("_ = 1", "", path) == "_ = 1"


async def test_pages_are_rendered_beside_the_event_loop() -> None:
    app = create_viewer_app(ViewerSettings("postgresql://nobody@127.0.0.1/none"))
    app.state.templates.loader = DictLoader({"error.html": "{{ thread() }}"})
    app.state.templates.globals["thread"] = threading.get_ident
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        answer = await client.get("/nothing")
    assert answer.status_code == 404 and int(answer.text) != threading.get_ident()


def test_numbers() -> None:
    assert [short_number(one) for one in (None, 1234567, 0.123456, 12345.6, 0.0)] == [
        "",
        "1,234,567",
        "0.1235",
        "12,346",
        "0",
    ]


def test_what_stands_between_backticks_is_code() -> None:
    assert quoted("no `<b>` and a ` alone") == "no <code>&lt;b&gt;</code> and a ` alone"


def test_an_age_has_the_time_of_the_clock_beside_it() -> None:
    moment = datetime.now(UTC) - timedelta(hours=30)
    clock = clock_time(moment)
    assert ago(moment) == f'<time datetime="{clock}">{clock}</time> <span class="quiet">1 d 6 h ago</span>'
    assert make_environment(ViewerSettings("", is_export=True)).filters["ago"](moment) == clock, "a file grows old"
    assert clock_time(datetime.fromisoformat("2026-11-26T08:00:01.5+01:00")) == "2026-11-26T07:00:01Z"
    assert (ago(None), clock_time(None)) == ("", "")


def test_a_workflow_id_with_slashes_is_one_part_of_the_address() -> None:
    settings = ViewerSettings("", temporal_ui="http://ui:8233", temporal_namespace="team")
    assert workflow_link(settings, "rollout/r/1") == "http://ui:8233/namespaces/team/workflows/rollout%2Fr%2F1"
    assert workflow_link(ViewerSettings(""), "rollout/r/1") == ""
