"""A page's model as HTML or, for the same address with `.json` or for a client that asks for JSON, as JSON."""

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import Request
from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from starlette.responses import HTMLResponse, Response

from ratchet.durations import duration_in_words
from reads.vitals import clock_time
from viewer.models.diffs import read_patch
from viewer.models.timeline import longest_stage, took
from viewer.settings import ViewerSettings

FOLDER = Path(__file__).parent
_MAX_HIGHLIGHTED_CHARS = 4000
"""Longer texts are not highlighted: agents write them, and some lexers need time that is quadratic in the length."""
_LANGUAGES = {
    ".c": "c", ".cpp": "cpp", ".css": "css", ".go": "go", ".h": "c", ".html": "html", ".java": "java",
    ".js": "javascript", ".json": "json", ".py": "python", ".rb": "ruby", ".rs": "rust", ".sh": "bash", ".sql": "sql",
    ".toml": "toml", ".ts": "typescript", ".xml": "xml", ".yaml": "yaml", ".yml": "yaml",
}  # fmt: skip
"""The language of a file by its suffix; other files are plain text, so that an agent cannot choose a slow lexer."""
_FORMATTER = HtmlFormatter(nowrap=True)
_QUOTED = re.compile("`([^`]+)`")


def make_environment(settings: ViewerSettings) -> Environment:
    """Return the templates with the filters that they use. All texts are escaped: agents and models wrote them."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": lambda seconds: "" if seconds is None else duration_in_words(seconds),
        "ago": clock_time if settings.is_export else ago,
        "quoted": quoted,
        "clock": clock_time,
        "took": took,
        "longest_stage": longest_stage,
        "number": short_number,
        "code": highlighted,
        "patch": read_patch,
        "json_text": lambda value: orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode(),
        "data_json": _data_json,
        "clip": clip,
        "plural": lambda number, word: f"{number:,} {word}" + ("" if number == 1 else "s"),
        "words": lambda value: str(value).replace("_", " "),
    }
    environment.globals |= {
        "settings": settings,
        "workflow_link": lambda name: workflow_link(settings, name),
        "chats": None,
    }
    environment.globals["now"] = lambda: datetime.now(UTC)
    environment.globals["trace_link"] = lambda trace_id: settings.trace_url.replace("{trace_id}", trace_id)
    return environment


async def respond(request: Request, template: str, page: object, status: int = 200) -> Response:
    """Return the page in the form that the request wants, rendered in a thread, so that other requests go on."""
    return await asyncio.to_thread(_render, request, template, page, status)


def _render(request: Request, template: str, page: object, status: int) -> Response:
    if wants_json(request):
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
        body = orjson.dumps(page, option=options, default=str)
        return Response(body, status, media_type="application/json")
    environment: Environment = request.app.state.templates
    twin = "/runs" if request.url.path == "/" else quote(request.scope["path"].removesuffix("/"))
    context = {
        "page": page,
        "path": quote(request.scope["path"]),
        "query": request.url.query,
        "json_link": f"{twin}.json" + (f"?{request.url.query}" if request.url.query else ""),
    }
    return HTMLResponse(environment.get_template(template).render(context), status)


def wants_json(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return request.url.path.endswith(".json") or (accepted.startswith("application/json"))


def workflow_link(settings: ViewerSettings, workflow_id: str) -> str:
    """Return the address of a workflow in the Temporal UI, empty without a UI."""
    if not settings.temporal_ui:
        return ""
    return f"{settings.temporal_ui}/namespaces/{settings.temporal_namespace}/workflows/{quote(workflow_id, safe='')}"


def _data_json(value: object) -> Markup:
    """Return JSON for a script element that is data: no character of it can end the element."""
    text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


def highlighted(text: str, language: str = "", path: str = "") -> Markup:
    """Return code with syntax classes; long texts and unknown languages are only escaped."""
    name = language or _LANGUAGES.get(PurePosixPath(path).suffix)
    if not name or len(text) > _MAX_HIGHLIGHTED_CHARS:
        return Markup.escape(text)
    return Markup(highlight(text, get_lexer_by_name(name), _FORMATTER))


def ago(moment: datetime | None) -> Markup:
    """Return the time of a moment and its age; empty for None."""
    if moment is None:
        return Markup()
    age = duration_in_words((datetime.now(UTC) - moment).total_seconds())
    return Markup('<time datetime="{0}">{0}</time> <span class="quiet">{1} ago</span>').format(clock_time(moment), age)


def quoted(text: str) -> Markup:
    """Return the text with what stands between backticks as code."""
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(Markup.escape(text))))


def short_number(value: Any) -> str:
    """Return a number with at most four significant digits, empty for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def clip(text: str, chars: int = 4000) -> str:
    return text if len(text) <= chars else text[:chars] + f"\n… {len(text) - chars} more characters"
