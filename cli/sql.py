"""`ratchet sql`: read from the store with SQL, and list its tables."""

from typing import Annotated, Any

import typer

_LIMIT_SECONDS = 4
_TIMED_OUT = "57014"


def sql(
    query: Annotated[
        str | None, typer.Argument(help="One SELECT statement; without one, the tables are listed.", metavar="[QUERY]")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON objects.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
) -> None:
    """Query the store with SQL, in a transaction that can only read and that ends after 4 seconds."""
    from cli.console import print_json, print_table

    if query is None:
        tables = _tables()
        if json:
            print_json([{"table": name, "what": what, "columns": columns} for name, what, columns in tables])
        else:
            print_table("tables", ["table", "what a row is"], [[name, what] for name, what, _ in tables])
        return
    columns, rows = _read(query)
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif csv:
        _print_csv(columns, rows)
    else:
        print_table(
            f"{len(rows)} rows", columns, [["" if value is None else str(value) for value in row] for row in rows]
        )


def _read(query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the names of the columns and the rows. Raises ConfigError with Postgres' message for a wrong query."""
    from sqlalchemy.exc import DBAPIError

    from client.session import run_blocking
    from ratchet.errors import ConfigError
    from ratchet.store.views.read_only import ReadOnlyStore
    from stack.parts import Stack

    async def read() -> tuple[list[str], list[tuple[Any, ...]]]:
        async with (
            ReadOnlyStore(Stack().environment()["RATCHET_DATABASE_URL"], pool_size=1) as store,
            store.read() as connection,
        ):
            try:
                await connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{_LIMIT_SECONDS} s'")
                result = await connection.exec_driver_sql(query)
            except DBAPIError as error:
                state = str(getattr(error.orig, "sqlstate", None))
                if state < "53" or state == _TIMED_OUT:  # from class 53 on, the server itself has failed
                    raise ConfigError(f"Postgres refuses the query: {str(error.orig).rpartition('>: ')[2]}") from None
                raise
            return (list(result.keys()), [tuple(row) for row in result]) if result.returns_rows else ([], [])

    return run_blocking(read())


def _tables() -> list[tuple[str, str, list[str]]]:
    """Return name, first sentence of the description, and columns of each table that readers may see."""
    from ratchet.store.schema import Base
    from ratchet.store.views.read_only import HIDDEN_TABLES

    found = []
    for mapper in Base.registry.mappers:
        name = str(mapper.class_.__tablename__)
        if name not in HIDDEN_TABLES:
            what = " ".join((mapper.class_.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
            found.append((name, what, [column.name for column in mapper.columns]))
    return sorted(found)


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    import csv
    import sys

    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows(rows)
