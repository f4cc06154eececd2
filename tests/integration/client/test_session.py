"""Reports of the client as data frames, over a store with a run of every kind of outcome and over an empty run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from client import Client
from client.session import Rows, Run
from store.database import Database
from tests.integration.training.records import make_config, make_run
from tests.integration.viewer.filled_store import fill_run

REPORTS: list[Callable[[Run], Rows]] = [Run.steps, Run.mix, Run.groups, Run.rollouts, Run.evaluations, Run.steering]


async def test_a_frame_without_rows_has_the_columns_of_one_with_rows(
    database: Database, run_id: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    client = Client(tmp_path)
    no_runs = client.runs().frame()
    await fill_run(database, run_id, model)
    await make_run(database, "new", make_config(), model)
    runs = client.runs().frame()
    assert list(no_runs.columns) == list(runs.columns) and no_runs.empty
    for report in REPORTS:
        filled, empty = (report(client.run(name)).frame() for name in (run_id, "new"))
        assert empty.empty and len(empty.columns) > 4, report
        if not filled.empty:
            known = [name for name in empty.columns if filled[name].notna().all() and empty[name].dtype != float]
            assert known and empty.dtypes[known].equals(filled.dtypes[known]), report
