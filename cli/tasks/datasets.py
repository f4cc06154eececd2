"""`ratchet tasks`: build, check, import, list and admit the tasks of datasets."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer
from rich.console import Console

from cli.console import print_found, print_json, print_table, say
from ratchet import paths
from ratchet.bounded_numbers import LARGEST_INTEGER, MAX_ROWS
from ratchet.config import DatasetConfig
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError, DatasetError, MachineError, SandboxBusyError, SandboxFullError
from ratchet.types import JsonObject
from stack.parts import Stack

if TYPE_CHECKING:
    from store.tasks import TaskFields

tasks_app = typer.Typer(
    name="tasks",
    help="Build, check, import, list, show and admit tasks; print the integrity rules.",
    no_args_is_help=True,
)

Dataset = Annotated[Path, typer.Argument(help="A JSONL or parquet file, or a folder of Harbor tasks.")]
InputKey = Annotated[str, typer.Option(help="Column that holds the prompt.")]
LabelKey = Annotated[str, typer.Option(help="Column that holds the label.")]
MetadataKey = Annotated[str, typer.Option(help="Column that holds the metadata.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Label of a task; repeatable. Default: all tasks.")]
Network = Annotated[
    list[str] | None,
    typer.Option(help="`grade` or `pre_commands`: what grading boxes have an open network for, as in sandbox.network."),
]
User = Annotated[
    str, typer.Option(help="User that runs the tests, as grading.user does: `root` allows the tasks that need it.")
]
Json = Annotated[bool, typer.Option("--json")]


def _dataset(path: Path, input_key: str, label_key: str, metadata_key: str) -> DatasetConfig:
    path = Path(str(path).removeprefix("harbor:"))
    if not path.exists():
        raise DatasetError(f"{path}: does not exist; name a JSONL or parquet file, or a folder of Harbor tasks")
    return DatasetConfig(path=str(path.resolve()), input_key=input_key, label_key=label_key, metadata_key=metadata_key)


@tasks_app.command()
def check(
    dataset: Dataset,
    config: Annotated[Path | None, typer.Option(help="Run config to check the dataset against.")] = None,
    boxes: Annotated[
        bool,
        typer.Option(
            "--boxes", help="Prepare the first row of each image in a box; name what an agent sees beside the sources."
        ),
    ] = False,
    input_key: InputKey = "prompt",
    label_key: LabelKey = "label",
    metadata_key: MetadataKey = "metadata",
    json: Json = False,
) -> None:
    """List the errors of a dataset, and settings that are rarely intended. Exit code 1 if a row cannot be used."""
    from activities.datasets.base import Problem
    from activities.datasets.formats import check_rows
    from activities.datasets.lints import lint_config, lint_rows

    problems: list[str] = []
    first_of_image: dict[str, TaskFields] = {}
    good, longest = 0, 0

    def rows() -> "Any":
        nonlocal good, longest
        for row in check_rows(_dataset(dataset, input_key, label_key, metadata_key)):
            if isinstance(row, Problem):
                problems.append(str(row))
            else:
                good += 1
                longest = max(longest, len(row["spec"]["problem_statement"]))
                first_of_image.setdefault(row["image"], row)
                yield row

    lints = lint_rows(rows())
    if config is not None:
        lints += lint_config(load_config(config), longest_statement=longest)
    if boxes:
        lints += asyncio.run(_lint_boxes(list(first_of_image.values())))
    if json:
        print_json({"rows": good, "problems": problems, "lints": lints})
    else:
        for text in problems:
            print(text)
        for text in lints:
            print(f"note: {text}")
        say(f"{good} usable rows, {len(problems)} unusable rows, {len(lints)} notes")
    raise typer.Exit(1 if problems or not good else 0)


async def _lint_boxes(rows: "list[TaskFields]") -> list[str]:
    """Use the sandbox service that the environment names, else that of the stack, which is up then."""
    from activities.datasets.box_lints import lint_boxes
    from sandboxes.registry import sandbox_provider

    os.environ.update(Stack().environment())
    try:
        return [text async for text in lint_boxes(sandbox_provider(), rows)]
    except SandboxBusyError as error:
        remedy = (
            "; `ratchet up` starts the boxes of this stack"
            if Stack().has_gateway and not isinstance(error, SandboxFullError)
            else ""
        )
        raise MachineError(f"{error}{remedy}") from error


@tasks_app.command(name="import")
def import_(
    dataset: Dataset,
    input_key: InputKey = "prompt",
    label_key: LabelKey = "label",
    metadata_key: MetadataKey = "metadata",
    network: Network = None,
    user: User = "agent",
    json: Json = False,
) -> None:
    """Import a dataset and print what was understood. Rows that are already stored are left unchanged."""
    from activities.dataset_import import import_dataset
    from activities.datasets.formats import dataset_digest, read_rows
    from activities.datasets.lints import describe_rows
    from client import Client

    named = _dataset(dataset, input_key, label_key, metadata_key)
    digest = dataset_digest(named)
    understood = describe_rows(read_rows(named, digest), named.path)
    offered = {"sandbox.network": network or [], "grading.user": user}
    if not json:
        print(*understood, sep="\n")
    added = Client().read(lambda connection: import_dataset(connection, named, digest, offered))
    if json:
        print_json({"dataset": named.path, "digest": digest, "new": added, "understood": understood})
    else:
        say(f"{named.path}: {added} new tasks (digest {digest[:12]})")


@tasks_app.command(name="list")
def list_(
    dataset: Annotated[
        Path | None, typer.Argument(help="Dataset whose tasks are listed. Default: list the datasets.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.")] = 200,
    json: Json = False,
) -> None:
    """List datasets, or the tasks of one with the results of admission: per task the result of each patch, the duration
    of the gold one, and how many of the broken oracles that were tried are valid."""
    from client import Client
    from store import tasks

    if dataset is None:
        found = Client().read(tasks.list_datasets)
        rows = [
            [row["dataset"], row["dataset_digest"][:12], *(str(row[n]) for n in ("rows", "admitted", "quarantined"))]
            for row in found
        ]
        print_found(found, json, "datasets", ["dataset", "digest", "tasks", "admitted", "quarantined"], rows)
        return
    path = str(dataset.resolve())
    found = Client().read(lambda connection: tasks.list_tasks(connection, path, limit))
    words = {None: "not examined", True: "admitted", False: "quarantined"}
    rows = [
        [str(row["id"]), row["label"], row["grader"], words[row["admitted"]], *_evidence(row), row["reason"] or ""]
        for row in found
    ]
    columns = ["id", "label", "grader", "admission", "gold solved", "empty not solved", "gold seconds"]
    print_found(found, json, path, [*columns, "valid broken oracles", "reason"], rows)


def _evidence(row: JsonObject) -> list[str]:
    """Return the counts of a task's trials by patch, and the duration of the gold one; empty without an admission."""
    gold, empty, broken = (
        [trial for trial in row["evidence"] or [] if trial["patch"] == kind] for kind in ("gold", "empty", "broken")
    )
    num_solved = sum(trial["solved"] for trial in gold)
    num_unsolved = sum(not trial["solved"] and not trial["error"] for trial in empty)
    seconds = "" if row["gold_seconds"] is None else f"{row['gold_seconds']:.1f}"
    pool = _pool_in_words(broken) if broken else ""
    return [f"{num_solved}/{len(gold)}", f"{num_unsolved}/{len(empty)}", seconds, pool] if gold or empty else [""] * 4


@tasks_app.command(name="show")
def show_task_command(task: Annotated[str, typer.Argument(help="The task's id or label.")], json: Json = False) -> None:
    """Show one task: its row, and every admission with its evidence."""
    from client import Client
    from store import tasks

    found = Client().read(lambda connection: tasks.show_task(connection, task))
    if found is None:
        raise ConfigError(f"task {task} does not exist; `ratchet tasks list` lists them")
    if json:
        print_json(found)
        return
    console = Console()
    console.print(
        f"[bold]{found['label']}[/]  {found['grader']}  image {found['image']}  in {found['workdir']}  "
        f"({found['dataset']})"
    )
    console.print(found["spec"]["problem_statement"], markup=False, highlight=False)
    rows = [
        [f"{one['grader']} {one['grader_version']}", "admitted" if one["admitted"] else "quarantined", trial["patch"],
         "solved" if trial["solved"] else trial["error"] or "not solved", f"{trial['seconds']:.1f}", trial["reason"]]
        for one in found["admissions"] for trial in one["evidence"]
    ]  # fmt: skip
    print_table("admissions", ["grader", "result", "patch", "verdict", "seconds", "reason"], rows)


@tasks_app.command()
def admit(
    dataset: Dataset,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of grades of the gold and of the empty patch.")
    ] = 3,
    only: Only = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_INTEGER, help="Use only this many rows from the start.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Examine tasks again that the current graders have examined.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, max=1000, help="Number of tasks examined in parallel.")] = 2,
    eval_seconds: Annotated[float, typer.Option(min=1, max=1e9, help="Time limit of the tests, in seconds.")] = 600,
    network: Network = None,
    user: User = "agent",
    input_key: InputKey = "prompt",
    label_key: LabelKey = "label",
    metadata_key: MetadataKey = "metadata",
    json: Json = False,
) -> None:
    """Examine tasks: the gold patch must pass and the empty patch must fail, every time. Needs a running stack
    (`ratchet up`)."""
    from client.workflows import run_workflow
    from ratchet.grading_payloads import AdmitInput, AdmitResult

    named = _dataset(dataset, input_key, label_key, metadata_key)
    columns = {"input_key": input_key, "label_key": label_key, "metadata_key": metadata_key}
    wanted = AdmitInput(
        dataset=named.path,
        **columns,
        repeats=repeats,
        labels=only or [],
        limit=limit,
        again=again,
        window=window,
        eval_seconds=eval_seconds,
        network=network or [],
        user=user,
    )
    workflow_id = f"admit/{Path(named.path).stem}-{uuid4().hex[:6]}"
    result = asyncio.run(run_workflow(Stack(), "AdmitTasks", wanted, workflow_id, AdmitResult, say))
    if json:
        print_json(result.model_dump())
    else:
        say(
            f"{result.admitted} admitted, {result.quarantined} quarantined; "
            f"`ratchet tasks list {dataset}` shows the reasons"
        )


@tasks_app.command()
def build(
    recipes: Annotated[Path, typer.Argument(help="A recipe file or a folder of recipe files.")] = Path(
        "datasets/packages"
    ),
    out: Annotated[
        Path | None, typer.Option(help="The dataset to write; default: tasks.jsonl beside the recipes.")
    ] = None,
    only: Only = None,
    image: Annotated[str, typer.Option(help="Image of the boxes.")] = "host",
    python: Annotated[str, typer.Option(help="A Python with pytest in that image.")] = "/opt/ratchet/bin/python3",
    json: Json = False,
) -> None:
    """Build tasks from recipes: fetch the packages' source archives, plant the bugs, write the rows."""
    from activities.datasets.package_recipes import write_rows

    target = out or (recipes if recipes.is_dir() else recipes.parent) / "tasks.jsonl"
    labels = write_rows(recipes, target, paths.cache(), image, python, frozenset(only or ()))
    if json:
        print_json({"dataset": str(target.resolve()), "tasks": labels})
    else:
        say(f"{target}: {len(labels)} tasks; `ratchet tasks admit {target}` examines them")


def _pool_in_words(trials: list[JsonObject]) -> str:
    """Return the size of a pool, how many of it are weak, and the newest reason why a try was not valid."""
    valid = [trial["reason"] for trial in trials if trial["solved"]]
    weak = sum("weakly controlled" in reason for reason in valid)
    reasons = [trial["error"] or trial["reason"] for trial in trials if not trial["solved"]]
    words = f"{len(valid)}/{len(trials)}" + (f" ({weak} weak)" if weak else "")
    return words + (f": {reasons[-1]}" if reasons else "")


@tasks_app.command()
def rules(json: Json = False) -> None:
    """Print the integrity rules."""
    from grading.integrity_rules import rules_table

    found = rules_table()
    print_found(found, json, "integrity rules", list(found[0]), [list(row.values()) for row in found])
