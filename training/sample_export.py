"""Export samples to files that other tools read: JSON lines and slime's debug dumps.

runs/<config's name>_<when the run began>/samples.jsonl
                                          rollout_dumps/rollout_<step>.pt
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import AgentExit, JsonObject, Outcome
from ratchet.vime_names import ROLLOUT_ID
from store import retention, samples
from store.samples import Sample
from store.schema import RunTable

_STATUS: dict[str | None, str] = {
    None: "pending",
    Outcome.CANCELLED: "aborted",
    AgentExit.DONE: "completed",
    AgentExit.TURN_LIMIT: "truncated",
    AgentExit.CONTEXT_FULL: "truncated",
    AgentExit.TIME_BUDGET: "truncated",
}
Decode = Callable[[list[int]], str]


def sample_fields(sample: Sample, decode: Decode) -> JsonObject:
    """Return a sample under slime's field names, with arrays as numpy.

    `tokens` is the whole chain. Masks and logprobs are of its last `response_length` tokens, which follow the first
    prompt. `prompt` and `response` are decoded for reading only.
    """
    chain = sample.chain
    prompt, outcome = sample.prompt_length, sample.metadata["outcome"]
    return {
        "group_index": sample.group_id,
        "index": sample.member,
        "rollout_id": chain.rollout_id,
        "prompt": decode(chain.ids[:prompt].tolist()),
        "response": decode(chain.ids[prompt:].tolist()),
        "tokens": chain.ids,
        "response_length": len(chain.ids) - prompt,
        "loss_mask": chain.trained[prompt:].astype(np.int8),
        "rollout_log_probs": chain.logprobs[prompt:],
        "policy_steps": chain.policy_steps[prompt:],
        "turn_ids": chain.turn_ids[prompt:],
        "weight_versions": sample.weight_versions,
        "label": sample.label,
        "reward": sample.reward,
        "rollout_reward": sample.rollout_reward,
        "num_chains": sample.num_chains,
        "advantage": sample.advantage,
        "step": sample.step,
        "remove_sample": sample.reward is None or not bool(chain.trained.any()),
        "status": _STATUS.get(outcome if sample.reward is None else sample.agent_exit or AgentExit.DONE, "failed"),
        "metadata": sample.metadata,
    }


async def write_jsonl(found: AsyncIterator[Sample], decode: Decode, path: Path) -> int:
    """Write one JSON object per line; return the number of samples."""
    number = 0
    with _whole_file(path) as partial, partial.open("wb") as file:
        async for sample in found:
            values = sample_fields(sample, decode)
            file.write(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            number += 1
    return number


async def write_dump(found: AsyncIterator[Sample], decode: Decode, step: int | str, path: Path) -> int:
    """Write a step's samples as slime's `--save-debug-rollout-data` does; return their number.

    `torch.load(path, weights_only=True)` reads the file.
    """
    import torch

    def tensors(values: JsonObject) -> JsonObject:
        return {
            name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }

    rows = [tensors(sample_fields(sample, decode)) async for sample in found]
    with _whole_file(path) as partial:
        torch.save({"rollout_id": step, "samples": rows}, partial)
    return len(rows)


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file that takes the place of `path` once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    partial.replace(path)


async def export_run(
    connection: AsyncConnection, run_id: str, formats: Sequence[str], out: Path | None = None
) -> dict[Path, int]:
    """Write the run's samples; return the files with their number of samples.

    Raises ConfigError for an unknown run, and for one whose turns are archived.
    """
    run = (await connection.execute(select(RunTable).where(RunTable.run_id == run_id))).one_or_none()
    if run is None:
        raise ConfigError(f"there is no run {run_id!r}; see `ratchet show runs`")
    if run.config.get("endpoint"):
        raise ConfigError(f"run {run_id} was answered by an endpoint, whose logprobs are not known")
    await retention.require_turns(connection, run_id)
    out = out or Path("runs") / f"{Path(run.config_name).stem or run_id}_{run.created_at:%Y%m%d-%H%M%S}"
    written: dict[Path, int] = {}
    if "jsonl" in formats:
        path = out / "samples.jsonl"
        found = samples.samples_of_run(connection, run_id)
        written[path] = await write_jsonl(found, _decoder(Path(run.model_path)), path)
    if "pt" in formats:
        written |= await dump_steps(connection, run_id, str(out / "rollout_dumps" / "rollout_{rollout_id}.pt"))
    return written


async def dump_steps(connection: AsyncConnection, run_id: str, pattern: str, again: bool = True) -> dict[Path, int]:
    """Write a debug dump of each step whose rollouts have ended; return the new files with their number of samples.

    `pattern`: a path, in which ROLLOUT_ID becomes a key of `samples.rollouts_by_step`. `again`: write files that are
    newer than what they contain, too."""
    model_path = (await connection.execute(select(RunTable.model_path).where(RunTable.run_id == run_id))).scalar_one()
    decode: Decode | None = None
    written: dict[Path, int] = {}
    for name, of_step in (await samples.rollouts_by_step(connection, run_id)).items():
        path = Path(pattern.replace(ROLLOUT_ID, name))
        if again or name == "unused" or not path.exists() or path.stat().st_mtime < of_step.changed_at.timestamp():
            decode = decode or _decoder(Path(model_path))
            step = int(name) if name.isdigit() else None
            found = samples.samples_of_rollouts(connection, run_id, step, of_step.ids)
            written[path] = await write_dump(found, decode, name if step is None else step, path)
    return written


def _decoder(model_path: Path) -> Decode:
    """Return the model's decoder, or one that returns "" if the model's directory is gone; the ids are what counts."""
    if not (model_path / "tokenizer.json").is_file():
        return lambda ids: ""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
