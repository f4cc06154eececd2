"""`ratchet sql`: read from the store with SQL, and list its tables."""

import csv
import sys
from typing import Annotated, Any

import typer

from cli.console import print_found


def sql(
    query: Annotated[
        str | None, typer.Argument(help="One SELECT statement; without one, the tables are listed.", metavar="[QUERY]")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON objects.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
) -> None:
    """Query the store with SQL, in a transaction that can only read and that ends after 4 seconds."""
    from client import Client
    from client.read_only_sql import describe_tables

    if query is None:
        tables = describe_tables()
        found = [{"table": one.name, "what": one.what, "columns": one.columns} for one in tables]
        print_found(found, json, "tables", ["table", "what a row is"], [[one.name, one.what] for one in tables])
        return
    answer = Client().sql(query)
    if csv and not json:
        _print_csv(answer.columns, answer.rows)
        return
    objects = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    rows = [["" if value is None else str(value) for value in row] for row in answer.rows]
    print_found(objects, json, f"{len(rows)} rows", answer.columns, rows)


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)
