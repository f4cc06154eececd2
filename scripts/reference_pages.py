"""The pages of docs/reference/: commands, tables of the store and HTTP routes, from the code that defines them."""

import inspect
import re
from collections.abc import Iterable
from typing import Any


def page(title: str, source: str, text: str) -> str:
    """Return a page with its title and the place that it is made from."""
    return f"# {title}\n\nGenerated from `{source}` by `make docs`.\n\n{text}"


def commands_page() -> str:
    """Return every command with its arguments and options, as `--help` has them."""
    import typer
    from typer.cli import get_docs_for_click

    from cli.main import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="ratchet"), name="ratchet")
    _, _, commands = text.partition("\n## ")
    about = f"`ratchet COMMAND --help` prints the same.\n\n{getattr(app.info, 'epilog', '') or ''}\n"
    return page("Commands", "cli/", about + "\n## " + re.sub(r"\n{3,}", "\n\n", commands).strip() + "\n")


def tables_page() -> str:
    """Return every table of the store with its columns, types and keys."""
    from store.schema.base import Base

    lines = ["`ratchet sql` reads them in a transaction that cannot write. Times are in UTC, durations in seconds."]
    for mapper in sorted(Base.registry.mappers, key=lambda one: str(one.local_table)):
        table = mapper.local_table
        lines += ["", f"## {table}", "", *_paragraphs(mapper.class_), "| column | type | |", "|---|---|---|"]
        for column in table.columns:
            lines.append(f"| `{column.name}` | {_type(column)} | {_notes(column)} |")
    return page("Tables", "store/schema/", "\n".join(lines) + "\n")


def _type(column: Any) -> str:
    from sqlalchemy.dialects import postgresql

    return str(column.type.compile(postgresql.dialect())).lower()  # type: ignore[no-untyped-call]


def _notes(column: Any) -> str:
    notes = ["key"] if column.primary_key else []
    notes += [f"→ `{key.column.table.name}`" for key in column.foreign_keys]
    notes += ["may be NULL"] if column.nullable else []
    return ", ".join(notes)


def http_page() -> str:
    """Return every address of the viewer that answers with JSON, and its parameters."""
    from fastapi.routing import APIRoute

    from viewer.app import create_viewer_app
    from viewer.settings import ViewerSettings

    lines = [
        "The viewer only reads. Without `.json` the same addresses are pages. The model API that agents call is in",
        "[adapter.md](../adapter.md), the metrics of `/metrics` in [operating.md](../operating.md#prometheus).",
        "",
        "| address | parameters |",
        "|---|---|",
    ]
    app = create_viewer_app(ViewerSettings(database_url="postgresql://reader@localhost/none"))
    routes = [one for one in app.routes if isinstance(one, APIRoute) and one.path.endswith(".json")]
    lines += [
        f"| `{route.path}` | {', '.join(f'`{one.alias}`' for one in route.dependant.query_params)} |"
        for route in sorted(routes, key=lambda one: one.path)
    ]
    return page("HTTP", "viewer/routes/", "\n".join(lines) + "\n")


def _paragraphs(documented: Any) -> Iterable[str]:
    for part in (inspect.getdoc(documented) or "").split("\n\n"):
        yield " ".join(part.split())
        yield ""
