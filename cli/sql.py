"""`ratchet sql`: read from the store with SQL, and list its tables."""

import csv
import sys
from typing import Annotated, Any

import typer

from cli.console import print_json, print_table


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
        if json:
            print_json([{"table": one.name, "what": one.what, "columns": one.columns} for one in tables])
        else:
            print_table("tables", ["table", "what a row is"], [[one.name, one.what] for one in tables])
        return
    found = Client().sql(query)
    if json:
        print_json([dict(zip(found.columns, row, strict=True)) for row in found.rows])
    elif csv:
        _print_csv(found.columns, found.rows)
    else:
        rows = [["" if value is None else str(value) for value in row] for row in found.rows]
        print_table(f"{len(rows)} rows", found.columns, rows)


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)
