"""`ratchet models checkpoints` lists and exports checkpoints without a running learner."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from store import runs
from store.database import Database
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_planned_run
from training.rank_runtime import RankSettings


async def ratchet(database: Database, home: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "RATCHET_HOME": str(home), "RATCHET_DATABASE_URL": database.url, "COLUMNS": "400"}
    command = (sys.executable, "-m", "cli.main", "models", "checkpoints", *arguments)
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, env=environment, **pipes)
    out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@pytest.mark.timeout(900)
async def test_list_and_export(database: Database, run_id: str, model: Path, tmp_path: Path) -> None:
    """Of three checkpoints in six steps two are kept; transformers loads the published weights from each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    await make_planned_run(database, run_id, make_config(), model, tmp_path / "policies")
    settings = RankSettings(run_id, database.url, tmp_path / "policies", tmp_path / "checkpoints")
    await asyncio.to_thread(supervise, settings, 1, tmp_path / "ranks")

    code, out, _ = await ratchet(database, tmp_path, "list", run_id, "--json")
    rows = json.loads(out)
    assert code == 0 and [(row["step"], row["mib"] is not None) for row in rows] == [(6, True), (4, True), (2, False)]
    code, out, _ = await ratchet(database, tmp_path, "list", run_id)
    assert code == 0 and "deleted" in out and rows[0]["uri"] in out

    for step, arguments in ((6, ()), (4, ("--step", "4"))):
        exported = tmp_path / f"exported-{step}"
        code, out, error = await ratchet(database, tmp_path, "export", run_id, str(exported), *arguments)
        assert code == 0 and f"step {step} of {run_id}" in error, error  # progress goes to standard error
        async with database.begin() as connection:
            version = await runs.newest_version(connection, run_id, step)
        assert version is not None
        ours, published = (load_file(directory / "model.safetensors") for directory in (exported, Path(version.uri)))
        assert ours.keys() == published.keys() and all((ours[name] == published[name]).all() for name in ours)
        assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
        assert AutoTokenizer.from_pretrained(exported).chat_template

    for arguments, sentence in (
        (("--step", "2"), "available steps: 6, 4"),
        (("--step", "6"), "exists already"),
    ):
        code, _, error = await ratchet(database, tmp_path, "export", run_id, str(tmp_path / "exported-6"), *arguments)
        assert code == 2 and sentence in error, error
