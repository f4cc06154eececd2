"""`ratchet models checkpoints` lists and exports checkpoints without a running learner."""

import asyncio
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from store import runs
from store.database import Database
from tests.integration.ratchet_command import Ended, Ratchet
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_planned_run
from training.rank_runtime import RankSettings


@pytest.mark.timeout(900)
async def test_list_and_export(ratchet: Ratchet, database: Database, run_id: str, model: Path, tmp_path: Path) -> None:
    """Of three checkpoints in six steps two are kept; transformers loads the published weights from each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    await make_planned_run(database, run_id, make_config(), model, tmp_path / "policies")
    settings = RankSettings(run_id, database.url, tmp_path / "policies", tmp_path / "checkpoints")
    await asyncio.to_thread(supervise, settings, 1, tmp_path / "ranks")

    def checkpoints(*arguments: str) -> Ended:
        variables = {"RATCHET_HOME": str(tmp_path), "RATCHET_DATABASE_URL": database.url, "COLUMNS": "400"}
        return ratchet("models", "checkpoints", *arguments, **variables)

    listed = checkpoints("list", run_id, "--json")
    rows = json.loads(listed.output)
    assert listed.code == 0 and [(row["step"], row["mib"] is not None) for row in rows] == [
        (6, True),
        (4, True),
        (2, False),
    ]
    table = checkpoints("list", run_id)
    assert table.code == 0 and "deleted" in table.output and rows[0]["uri"] in table.output

    for step, arguments in ((6, ()), (4, ("--step", "4"))):
        exported = tmp_path / f"exported-{step}"
        done = checkpoints("export", run_id, str(exported), *arguments)
        assert done.code == 0 and f"step {step} of {run_id}" in done.error, done.error  # progress: on standard error
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
        refused = checkpoints("export", run_id, str(tmp_path / "exported-6"), *arguments)
        assert refused.code == 2 and sentence in refused.error, refused.error
