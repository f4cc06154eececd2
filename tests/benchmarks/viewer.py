"""The time of every kind of page with 10⁵ rollouts and 10⁶ turns, and of a rollout with 100 turns and 86,000 tokens.

Each page is asked for repeatedly over HTTP from one viewer process. The figure to compare with is /health, the
same way through the process with one trivial query.
"""

import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import numpy as np
import orjson
from sqlalchemy import text

from cli.console import say
from reads.reader_role import grant_reader_role
from stack.ports import free_port
from stack.postgres import database_url, embedded_server
from store.arrays import halves_to_bytes, ids_to_bytes, logprobs_to_bytes, pack_json, pack_text
from store.database import Database
from store.migration import migrate
from tests.benchmarks._commit import commit
from tests.benchmarks._options import asks_for_all_repetitions
from tests.integration.training.records import make_config, make_run
from viewer.app import ViewerServer
from viewer.settings import ViewerSettings

RUN = "large"
NUM_GROUPS = 12_500
GROUP_SIZE = 8
TURNS = 10
BIG_TURNS = 100
BIG_TOKENS = 860  # per turn
REPEATS = 40

_REQUEST = pack_json({"after": None, "system": "s", "messages": [{"role": "user", "content": "look " * 60}]}).hex()
_CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": {"command": "cat a.py"}}}
_ANSWER = pack_json({"message": {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]}}).hex()
_IDS = ids_to_bytes(range(60)).hex()
_LOGPROBS = logprobs_to_bytes([-0.5] * 60).hex()
_HALVES = halves_to_bytes(np.linspace(0, 3, 60).astype(np.float16)).hex()
_LOG = pack_text("2 tests ran\n").hex()

FILL = f"""
INSERT INTO task (dataset, dataset_digest, row_digest, row_no, label, image, workdir, grader, spec)
  SELECT 'd', 'd', n::text, n, 'task-' || n, 'host', '/w', 'g', '{{}}' FROM generate_series(0, 499) n;
INSERT INTO rollout_group (run_id, group_no, task_id, purpose, state, size, min_graded, temperature, workflow_id,
    started_step) SELECT '{RUN}', n, 1 + n % 500, 'train', CASE WHEN n < {NUM_GROUPS - 20} THEN 'consumed'
    ELSE 'open' END, {GROUP_SIZE}, 2, 1, 'group/' || n, n / 32 FROM generate_series(0, {NUM_GROUPS - 1}) n;
INSERT INTO rollout (run_id, group_id, task_id, member, purpose, workflow_id, owner, attempt, harness, temperature,
    outcome, outcome_reason, reward, agent_exit, num_turns, num_trained_tokens, claimed_at, ended_at)
  SELECT run_id, g.id, task_id, m, 'train', 'rollout/' || group_no || '/' || m, 'w', 1, 'h', 1,
    CASE WHEN state = 'consumed' THEN 'graded' END, 'all tests passed',
    CASE WHEN state = 'consumed' THEN (group_no * 7 + m * 3) % 2 END, 'done', {TURNS}, 600, now(), now()
  FROM rollout_group g, generate_series(0, {GROUP_SIZE - 1}) m;
INSERT INTO batch_item (run_id, step, group_id, use, rewards)
  SELECT run_id, 1 + group_no / 32, id, 'trained', '[0, 1, 0, 1]' FROM rollout_group WHERE state = 'consumed';
INSERT INTO batch (run_id, step, state, planned_at, stepped_at, members, denominators, knobs, seed)
  SELECT b.run_id, b.step, 'committed', now(), now() + interval '1 minute',
    jsonb_agg(jsonb_build_object('rollout_id', r.id, 'group_id', r.group_id,
    'grade_id', null, 'reward', r.reward, 'advantage', r.reward - 0.5, 'num_tokens', 600, 'update', 0,
    'weight', 0.001)), '[]', '{{"min_policy_step": 0}}', 0
  FROM batch_item b JOIN rollout r ON r.group_id = b.group_id GROUP BY b.run_id, b.step;
INSERT INTO metric (run_id, step, name, value)
  SELECT run_id, step, name, random() FROM batch, unnest(ARRAY['reward_mean', 'entropy', 'mismatch_kl', 'mismatch_max',
    'ratio_ess', 'masked_fraction', 'staleness_mean', 'staleness_max', 'loss', 'grad_norm', 'trained_tokens',
    'chain_tokens_per_second', 'step_seconds', 'wait_for_batch_seconds', 'load_seconds', 'publish_seconds',
    'groups_with_signal_fraction']) name;
INSERT INTO policy_version (version, run_id, step, epoch, uri, files)
  SELECT run_id || '/' || step || '.e1', run_id, step, 1, '', '[]' FROM batch;
INSERT INTO engine (address, model_path) SELECT 'http://10.0.0.' || n, 'm' FROM generate_series(1, 64) n;
INSERT INTO engine_load (engine_id, version) SELECT engine.id, policy_version.version FROM policy_version, engine;
INSERT INTO attempt (rollout_id, n) SELECT id, 1 FROM rollout;
INSERT INTO session (rollout_id, attempt, temperature, model, limits) SELECT id, 1, 1, 'policy', '{{}}' FROM rollout;
INSERT INTO turn (session_id, rollout_id, attempt, digest, ordinal, state, dialect, prompt_tokens, suffix_ids,
    sampled_ids, logprobs, num_sampled, version_spans, temperature, request, answer, delivered, worker, completed_at)
  SELECT id, rollout_id, 1, decode(md5(id || '.' || o), 'hex'), o, 'completed', 'chat', 60,
    decode('{_IDS}', 'hex'), decode('{_IDS}', 'hex'), decode('{_LOGPROBS}', 'hex'), 60,
    '[{{"version": "{RUN}/1.e0", "start": 0, "end": 60}}]', 1, decode('{_REQUEST}', 'hex'), decode('{_ANSWER}', 'hex'),
    true, 'gone', now() FROM session, generate_series(0, {TURNS - 1}) o;
INSERT INTO chain (rollout_id, no, leaf_turn_id, num_tokens, num_trained)
  SELECT rollout_id, 0, max(id), 120 * {TURNS}, 60 * {TURNS} FROM turn GROUP BY rollout_id;
INSERT INTO chain_span (chain_id, no, turn_id, sampled, trained, start, length, source_start)
  SELECT c.id, 2 * t.ordinal + s, t.id, s = 1, s = 1, 120 * t.ordinal + 60 * s, 60, 0
  FROM chain c JOIN turn t ON t.rollout_id = c.rollout_id, generate_series(0, 1) s;
INSERT INTO trained_turn (run_id, step, turn_id, rollout_id, start, entropies, log_ratios)
  SELECT b.run_id, b.step, t.id, r.id, 120 * t.ordinal + 60, decode('{_HALVES}', 'hex'), decode('{_HALVES}', 'hex')
  FROM batch_item b JOIN rollout r ON r.group_id = b.group_id JOIN turn t ON t.rollout_id = r.id;
INSERT INTO sandbox (provider, provider_id, role, rollout_id, attempt, workflow_id, image, state, live_at, released_at)
  SELECT 'p', id::text, 'agent', id, 1, workflow_id, 'host', CASE WHEN outcome IS NULL THEN 'live' ELSE 'released' END,
    now(), now() FROM rollout;
INSERT INTO patch (rollout_id, attempt, base_commit, diff, num_bytes, num_files)
  SELECT id, 1, '', decode('{_LOG}', 'hex'), 12, 1 FROM rollout WHERE outcome IS NOT NULL;
INSERT INTO grade (rollout_id, patch_id, grader, grader_version, solved, tests, log, duration_seconds, flags)
  SELECT rollout_id, id, 'g', '1', true, '{{"t": "passed"}}', decode('{_LOG}', 'hex'), 1,
    CASE WHEN id % 5000 = 0 THEN '[{{"what": "w", "place": "p"}}]'::jsonb ELSE '[]' END FROM patch;
UPDATE rollout SET grade_id = grade.id FROM grade WHERE grade.rollout_id = rollout.id
"""

BIG = """
WITH r AS (INSERT INTO rollout (run_id, task_id, member, purpose, workflow_id, harness, temperature, outcome, reward,
    num_turns) VALUES (:run, 1, 0, 'train', 'big', 'h', 1, 'graded', 1, :turns) RETURNING id),
  s AS (INSERT INTO session (rollout_id, attempt, temperature, model, limits) SELECT id, 1, 1, 'p', '{}' FROM r
    RETURNING id, rollout_id),
  t AS (INSERT INTO turn (session_id, rollout_id, attempt, digest, ordinal, state, dialect, prompt_tokens, suffix_ids,
    sampled_ids, logprobs, num_sampled, version_spans, temperature, request, answer, delivered, worker, completed_at)
    SELECT id, rollout_id, 1, decode(md5(o::text), 'hex'), o, 'completed', 'chat', 430 * o, :ids, :ids, :logprobs, 430,
      '[{"version": "large/1.e0", "start": 0, "end": 430}]', 1, :request, :answer, true, 'gone', now()
    FROM s, generate_series(0, CAST(:turns AS int) - 1) o RETURNING id, rollout_id, ordinal),
  c AS (INSERT INTO chain (rollout_id, no, leaf_turn_id, num_tokens, num_trained)
    SELECT rollout_id, 0, max(id), 860 * count(*), 430 * count(*) FROM t GROUP BY rollout_id RETURNING id),
  p AS (INSERT INTO chain_span (chain_id, no, turn_id, sampled, trained, start, length, source_start)
    SELECT c.id, 2 * t.ordinal + s, t.id, s = 1, s = 1, 860 * t.ordinal + 430 * s, 430, 0
    FROM c, t, generate_series(0, 1) s)
SELECT id FROM r
"""


async def fill(database: Database) -> int:
    """Fill the store; return the id of the rollout with many turns."""
    await make_run(database, RUN, make_config())
    for statement in FILL.split(";\n"):
        started = time.monotonic()
        async with database.begin() as connection:
            await connection.execute(text(statement.replace(":", "\\:") if "::" in statement else statement))
        say(f"{' '.join(statement.split())[:50]}: {time.monotonic() - started:.1f} s")
    answer = pack_json({"message": {"role": "assistant", "content": "I read. " * 200, "tool_calls": [_CALL]}})
    values = {
        "run": RUN,
        "turns": BIG_TURNS,
        "ids": ids_to_bytes(range(430)),
        "logprobs": logprobs_to_bytes([-0.5] * 430),
        "request": pack_json({"after": 1, "messages": [{"role": "tool", "content": "line\n" * 300}]}),
        "answer": answer,
    }
    async with database.begin() as connection:
        big = int((await connection.execute(text(BIG), values)).scalar_one())
        await connection.execute(text("UPDATE run SET step = (SELECT max(step) FROM batch)"))
    async with database.engine.connect() as plain:
        await (await plain.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql("VACUUM ANALYZE")
    return big


@asynccontextmanager
async def serving(settings: ViewerSettings) -> AsyncIterator[None]:
    server = ViewerServer(settings)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await task


async def measure(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    seconds = []
    for _ in range(REPEATS):
        started = time.monotonic()
        answer = await client.get(path)
        seconds.append(time.monotonic() - started)
        assert answer.status_code == 200, f"{path}: {answer.text[:300]}"
    return {
        "p50_ms": round(1000 * median(seconds), 1),
        "p95_ms": round(1000 * quantiles(seconds, n=20)[-1], 1),
        "kib": round(len(answer.content) / 1024),
    }


async def bench(url: str) -> dict[str, Any]:
    async with Database(url, statement_seconds=1800) as database:
        await asyncio.to_thread(migrate, url)
        await grant_reader_role(database)
        big = await fill(database)
        async with database.begin() as connection:
            middle = (await connection.execute(text("SELECT id FROM rollout OFFSET 50000 LIMIT 1"))).scalar_one()
    pages = {
        "health": "/health",
        "runs": "/runs",
        "run": f"/runs/{RUN}",
        "costs": f"/runs/{RUN}/costs",
        "groups": f"/runs/{RUN}/groups",
        "groups without signal": f"/runs/{RUN}/groups?state=no_signal",
        "tasks of the run": f"/runs/{RUN}/tasks",
        "commands": f"/runs/{RUN}/commands",
        "commands of a step": f"/runs/{RUN}/commands?step=200",
        "versions": f"/runs/{RUN}/versions",
        "steering": f"/runs/{RUN}/steering",
        "search": f"/search?q=look&run={RUN}",
        "search in all runs": "/search?q=look",
        "step": f"/runs/{RUN}/steps/200",
        "rollouts": f"/rollouts?run={RUN}",
        "rollouts in the middle": f"/rollouts?run={RUN}&before={middle}",
        "rollouts by reward": f"/rollouts?run={RUN}&reward_from=1",
        "rollouts, the longest first": f"/rollouts?run={RUN}&sort=longest",
        "rollouts, ended last first": f"/rollouts?run={RUN}&sort=ended",
        "rollouts in a stage": f"/rollouts?run={RUN}&stage=agent%20works",
        "rollouts of a task's label": f"/rollouts?run={RUN}&task=task-77",
        "rollouts of an unknown label": f"/rollouts?run={RUN}&task=nothing",
        "rollouts flagged": f"/rollouts?run={RUN}&flagged=true",
        "group": "/groups/6000",
        "task": "/tasks/100",
        "rollout": f"/rollouts/{middle}",
        "tokens": f"/rollouts/{middle}/tokens",
        "tokens by entropy": f"/rollouts/{middle}/tokens?colour=entropy",
        "rollout of 100 turns": f"/rollouts/{big}",
        "its last tokens": f"/rollouts/{big}/tokens?first=85000",
        "compare": f"/compare?run={RUN}",
    }
    settings = ViewerSettings(url, port=free_port())
    found = {}
    async with (
        serving(settings),
        httpx.AsyncClient(base_url=settings.address, timeout=30, trust_env=False, follow_redirects=True) as client,
    ):
        for name, path in pages.items():
            await client.get(path)
            found[name] = await measure(client, path)
            say(f"{name}: {found[name]}")
    return found


def main() -> None:
    asks_for_all_repetitions(__doc__)  # there is one repetition
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ratchet-viewer-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        with embedded_server(Path(directory) / "data", port):
            pages = asyncio.run(bench(database_url(port)))
    report = {
        "commit": commit(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[1], 1),
        "rollouts": NUM_GROUPS * GROUP_SIZE + 1,
        "turns": NUM_GROUPS * GROUP_SIZE * TURNS + BIG_TURNS,
        "repeats": REPEATS,
        "pages": pages,
    }
    sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
