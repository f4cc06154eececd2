"""The queries that run for every rollout, turn or decision read no whole table, however much a store has collected.

The statements are not listed here: they are those that the real functions send, explained on a store of 60,000 rollouts
and 120,000 turns, and once more with statistics that are faked to say 10⁶ rollouts and 10⁸ turns.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.payloads import ViewRunInput
from ratchet.temporal_settings import load_temporal_settings
from reads.rollout_list import RolloutFilter, list_rollout_lines
from reads.rollouts import describe_rollout
from store import (
    box_failures,
    chains,
    grades,
    groups,
    open_rollouts,
    retention,
    rollouts,
    runs,
    sandboxes,
    sessions,
    tasks,
    token_statistics,
    turn_trees,
    turns,
)
from store.arrays import pack_text
from store.database import Database
from tests.integration.training.records import make_config, make_run

NUM_GROUPS = 30_000
GROUP_SIZE = 2
TURNS = 2
LARGE = {"rollout", "rollout_group", "turn", "attempt", "session", "sandbox", "grade", "patch", "chain", "chain_span"}
LARGE |= {"batch_item", "session_token", "trained_turn"}
_EMPTY = pack_text("").hex()
Explained = dict[str, set[str]]
"""Statement → the large tables that it reads as a whole."""

_FILL = f"""
INSERT INTO rollout_group (run_id, group_no, task_id, purpose, state, size, min_graded, temperature, workflow_id,
    ready_seq)
  SELECT :run, n, :task, 'train', CASE WHEN n < {NUM_GROUPS} - 4 THEN 'consumed' ELSE 'open' END, {GROUP_SIZE}, 2, 1,
    'group/' || :run || '/' || n, n FROM generate_series(0, {NUM_GROUPS} - 1) n;
INSERT INTO rollout (run_id, group_id, task_id, member, purpose, workflow_id, owner, attempt, harness, temperature,
    outcome, reward, claimed_at)
  SELECT run_id, id, task_id, m, purpose, 'rollout/' || :run || '/' || group_no || '/' || m, 'w', 1, 'h', 1,
    CASE WHEN state = 'consumed' THEN 'graded' END, CASE WHEN state = 'consumed' THEN 0 END, now()
  FROM rollout_group, generate_series(0, {GROUP_SIZE} - 1) m WHERE run_id = :run;
INSERT INTO batch_item (run_id, step, group_id, use)
  SELECT run_id, 1 + group_no / 64, id, 'trained' FROM rollout_group WHERE run_id = :run AND state = 'consumed';
INSERT INTO attempt (rollout_id, n) SELECT id, 1 FROM rollout WHERE run_id = :run;
INSERT INTO session (rollout_id, attempt, temperature, model, limits)
  SELECT id, 1, 1, 'policy', '{{}}' FROM rollout WHERE run_id = :run;
INSERT INTO session_token (session_id, token_hash) SELECT id, decode(md5(id::text), 'hex') FROM session;
INSERT INTO turn (session_id, rollout_id, attempt, digest, ordinal, state, dialect, prompt_tokens, suffix_ids,
    temperature, request, delivered, worker)
  SELECT id, rollout_id, 1, decode(md5(id || '.' || o), 'hex'), o, 'completed', 'chat', 8, '', 1,
    decode('{_EMPTY}', 'hex'), true, 'gone'
  FROM session, generate_series(0, {TURNS} - 1) o;
INSERT INTO chain (rollout_id, no, leaf_turn_id, num_tokens, num_trained) SELECT rollout_id, 0, max(id), 8, 8 FROM turn
  GROUP BY rollout_id;
INSERT INTO chain_span (chain_id, no, turn_id, sampled, trained, start, length, source_start)
  SELECT id, 0, leaf_turn_id, true, true, 0, 8, 0 FROM chain;
INSERT INTO trained_turn (run_id, step, turn_id, rollout_id, start, entropies, log_ratios)
  SELECT g.run_id, 1 + group_no / 64, leaf_turn_id, r.id, 0, repeat('ab', 8)::bytea, repeat('ab', 8)::bytea
  FROM chain JOIN rollout r ON r.id = rollout_id JOIN rollout_group g ON g.id = group_id WHERE state = 'consumed';
INSERT INTO sandbox (provider, provider_id, role, rollout_id, attempt, workflow_id, image, state, created_at, live_at,
    released_at)
  SELECT 'p', id::text, 'agent', id, 1, workflow_id, 'host', CASE WHEN outcome IS NULL THEN 'live' ELSE 'released' END,
    t, t, t FROM (SELECT *, now() - interval '1 second' * ({NUM_GROUPS * GROUP_SIZE} - id) t FROM rollout
    WHERE run_id = :run) r;
INSERT INTO patch (rollout_id, attempt, base_commit, diff, num_bytes, num_files)
  SELECT id, 1, '', decode('{_EMPTY}', 'hex'), 0, 0 FROM rollout WHERE run_id = :run;
INSERT INTO grade (rollout_id, patch_id, grader, grader_version, solved, rejected, tests, log, duration_seconds)
  SELECT rollout_id, id, 'g', '1', false, false, '{{}}', decode('{_EMPTY}', 'hex'), 1 FROM patch
"""


@pytest.fixture
async def store(database: Database, run_id: str) -> Database:
    """A run with many ended rollouts and sixteen open ones."""
    async with database.begin() as connection:  # the planner counts the pages that rows of earlier tests left
        await connection.execute(text(f"TRUNCATE {', '.join(LARGE)} CASCADE"))
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        task = "INSERT INTO task (dataset, dataset_digest, row_digest, row_no, label, image, workdir, grader, spec)"
        task_id = (
            await connection.execute(
                text(f"{task} VALUES ('d', 'd', 'r', 0, 't', 'host', '/w', 'g', '{{}}') RETURNING id")
            )
        ).scalar_one()
        for statement in _FILL.split(";\n"):
            values = {name: value for name, value in (("run", run_id), ("task", task_id)) if f":{name}" in statement}
            await connection.execute(text(statement), values)
    async with database.engine.connect() as plain:
        await (await plain.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql("VACUUM ANALYZE")
    return database


async def fake_statistics(database: Database) -> None:
    """Let the planner believe that every large table has as many rows as with 10⁶ rollouts and 10⁸ turns.

    It multiplies the rows per page of the statistics with the pages of the file.
    """
    factors = {"turn": 10**8 / (NUM_GROUPS * GROUP_SIZE * TURNS), "chain_span": 10**8 / (NUM_GROUPS * GROUP_SIZE)}
    factors["trained_turn"] = factors["chain_span"]
    faking = text(
        "UPDATE pg_class SET reltuples = reltuples * :factor WHERE oid IN (SELECT CAST(:name AS regclass) UNION "
        "SELECT indexrelid FROM pg_index WHERE indrelid = CAST(:name AS regclass))"
    )
    async with database.begin() as connection:
        for name in sorted(LARGE):
            factor = factors.get(name, 10**6 / (NUM_GROUPS * GROUP_SIZE))
            await connection.execute(faking, {"name": name, "factor": factor})
        plan = (await connection.execute(text("EXPLAIN (FORMAT JSON) SELECT * FROM turn"))).scalar_one()
        assert plan[0]["Plan"]["Plan Rows"] > 0.9e8


@contextmanager
def explaining(database: Database) -> Iterator[Explained]:
    """Explain every statement that is sent within the block, just before it is sent."""
    found: Explained = {}

    def explain(connection: Connection, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        if many or statement.lstrip()[:6].upper() not in ("SELECT", "UPDATE", "DELETE"):
            return
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", values).scalar_one()
        found[statement] = set(_whole_tables((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))

    event.listen(database.engine.sync_engine, "before_cursor_execute", explain)
    try:
        yield found
    finally:
        event.remove(database.engine.sync_engine, "before_cursor_execute", explain)


def _whole_tables(plan: dict[str, Any]) -> Iterator[str]:
    if plan["Node Type"] == "Seq Scan" and plan["Relation Name"] in LARGE:
        yield plan["Relation Name"]
    for child in plan.get("Plans", []):
        yield from _whole_tables(child)


async def read_what_is_read_often(connection: AsyncConnection, run_id: str) -> None:
    """Call what stages, turns, the sweep, the operator's commands and the watcher call."""
    assert await open_rollouts.oldest_open_workflows(connection, run_id, 1)
    rollout_id = (await list_rollout_lines(connection, RolloutFilter(run_id=run_id), 1))[0].id
    group_id = (await runs.open_groups(connection, run_id))[0].id
    await groups.get_group(connection, group_id)
    await groups.open_group_members(connection, group_id)
    await groups.settle_group(connection, group_id, accept_failed=False)
    workflow_id = (await list_rollout_lines(connection, RolloutFilter(run_id=run_id), 1))[0].workflow_id
    await rollouts.claim_rollout(connection, rollout_id, workflow_id, "w")
    await rollouts.take_fence(connection, rollout_id, 1)
    await rollouts.lock_rollout(connection, rollout_id)
    await rollouts.claimed_and_open(connection)
    await rollouts.temperature_of(connection, rollout_id)
    await rollouts.patch_of_attempt(connection, rollout_id, 1)
    await tasks.task_of_rollout(connection, rollout_id)
    session_id = await sessions.session_id_of(connection, rollout_id, 1)
    await sessions.read_progress(connection, [(rollout_id, 1)])
    await sessions.find_session(connection, b"unknown")
    await turns.find_calls(connection, session_id, "", b"unknown", 1)
    await turn_trees.load_tree(connection, session_id)
    await turns.load_metas(connection, rollout_id, 1)
    await chains.replace_chains(connection, rollout_id, [])
    await sandboxes.unused_sandbox(connection, rollout_id, 1, sandboxes.SandboxRole.AGENT, "w")
    await sandboxes.want_release_of_rollout(connection, rollout_id, "ended")
    await sandboxes.list_unreleased(connection, "p")
    await sandboxes.stale_creating_ids(connection, "p", 60)
    await box_failures.count_boxes(connection)
    await open_rollouts.count_open_rollouts(connection, run_id)
    await rollouts.close_sessions(connection, rollout_id)
    await describe_rollout(connection, rollout_id)
    await tasks.image_of_rollout(connection, rollout_id)
    await tasks.task_label_of_rollout(connection, rollout_id)
    await grades.patches_to_regrade(connection, run_id, None, rollout_id - 1000, 200)
    await token_statistics.record_trained_turns(connection, run_id, 2, [])
    assert not await token_statistics.read_trained_turns(connection, run_id, 2, range(1, 100))
    new = sandboxes.NewSandbox("p", sandboxes.SandboxRole.AGENT, rollout_id, 1, "w", "host")
    await sandboxes.reserve_sandbox(connection, new, 100, 100)


async def archive_a_page(connection: AsyncConnection, run_id: str) -> None:
    """Call what a prune calls for each page, although the run is open."""
    after = await retention.begin_part(connection, run_id)
    page = await retention.next_rollouts(connection, run_id, after, 8)
    for table in retention.ARCHIVED_TABLES:
        assert await retention.rows_to_archive(connection, table, page)
    await retention.drop_archived_rows(connection, run_id, after, page[-1])


async def require_no_whole_table(store: Database, run_id: str) -> None:
    settings = load_temporal_settings()
    activities = RunActivities(store, settings, RunConfigs(store, settings), cast(Client, None))
    with explaining(store) as found:
        await activities.advance_run(ViewRunInput(run_id=run_id))
        async with store.begin() as connection:
            await read_what_is_read_often(connection, run_id)
        async with store.begin() as connection:
            await archive_a_page(connection, run_id)
    assert len(found) > 60
    whole = {" ".join(statement.split())[:300]: tables for statement, tables in found.items() if tables}
    assert not whole, "\n".join(f"{tables}: {one}" for one, tables in whole.items())


async def test_no_frequent_query_reads_a_whole_table(store: Database, run_id: str) -> None:
    """As the store is, and with the statistics of 10⁸ turns. The fill takes most of the time, so one serves both."""
    with explaining(store) as found:
        async with store.begin() as connection:
            await connection.execute(text("SELECT count(*) FROM turn WHERE ordinal > 7"))
    assert list(found.values()) == [{"turn"}], "a query that reads a whole table is found"
    await require_no_whole_table(store, run_id)
    await fake_statistics(store)
    await require_no_whole_table(store, run_id)
