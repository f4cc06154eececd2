"""`ratchet models checkpoints`: list a run's checkpoints and export one as a Hugging Face directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import print_found, say
from ratchet import paths
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from store.checkpoints import CheckpointRow

checkpoints_app = typer.Typer(name="checkpoints", help="List and export a run's checkpoints.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="A run's id.")]


@checkpoints_app.command("list")
def list_all(run: RunArgument, json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List a run's checkpoints, newest first. The files of older ones are deleted when a newer one is committed; their
    rows stay."""
    found = [{**row.as_dict(), **_size(row)} for row in _rows(run)]
    keys = ("step", "epoch", "world_size", "num_threads", "mib", "uri")
    rows = [[str(row[key] or ("deleted" if key == "mib" else 0)) for key in keys] for row in found]
    columns = ["step", "epoch", "ranks", "threads", "MiB", "where"]
    print_found(found, json, f"checkpoints of {run}", columns, rows)


@checkpoints_app.command(name="export")
def export_checkpoint_command(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(help="Directory to create; it must not exist.")],
    step: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_INTEGER, help="Step of the checkpoint. Default: the newest.")
    ] = None,
) -> None:
    """Write a checkpoint's weights, tokenizer and template as a Hugging Face directory. Needs no learner and no GPU."""
    usable = [row for row in _rows(run) if Path(row.uri, ".metadata").exists()]
    chosen = next((row for row in usable if step is None or row.step == step), None)
    if chosen is None:
        kept = ", ".join(str(row.step) for row in usable) or "none"
        raise ConfigError(
            f"run {run} has no checkpoint{'' if step is None else f' of step {step}'} on this machine; "
            f"available steps: {kept}"
        )
    if directory.exists():
        raise ConfigError(f"{directory} exists already; name a directory that does not")
    from engine.policy_cache import PolicyCache
    from training.checkpoint import DamagedCheckpointError
    from training.learner import export_checkpoint

    try:
        with PolicyCache(paths.policies()) as cache:
            initial = cache.fetch(chosen.initial_uri, chosen.initial_files)
            export_checkpoint(initial, chosen.uri, directory.resolve())
    except DamagedCheckpointError as error:
        raise ConfigError(f"{error}; choose another checkpoint with --step") from error
    say(f"step {chosen.step} of {run} written to {directory}")


def _rows(run: str) -> "list[CheckpointRow]":
    from client import Client
    from store import checkpoints

    run_id = Client().run(run).run_id
    return Client().read(lambda connection: checkpoints.list_checkpoints(connection, run_id))


def _size(row: "CheckpointRow") -> dict[str, int | None]:
    files = [path.stat().st_size for path in Path(row.uri).glob("*") if path.is_file()]
    return {"mib": round(sum(files) / 2**20) if files else None}
