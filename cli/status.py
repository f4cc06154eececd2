"""`ratchet status`: the state of the stack's parts, or what a run waits for."""

import asyncio
import contextlib
import textwrap
import time
from typing import Annotated, Any

import typer

from cli.console import print_json
from ratchet.durations import duration_in_words
from ratchet.errors import RatchetError, StoreUnavailableError
from stack.parts import WATCHER, Stack
from stack.placement import part_kind

_STORE_SECONDS = 2.0
_ROW = "{:<{width}} {:<11} {:>11} {:>8}  {}"
_WIDTH = 12
_LINE_WIDTH = 79
_RUNS_EXPLAINED = 3
_DIAGNOSIS_SECONDS = 4.0


def status(
    run_id: Annotated[str | None, typer.Argument(help="A run of `ratchet show runs`.", metavar="[RUN]")] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the state of the local stack; or of a run, what it waits for, and since when.

    A part is `answering` if its newest probe succeeded. Open runs are listed with what they wait for, and of one with
    `sandbox.adaptive` how many boxes it may use now, and why.

    A run may wait for a part, a box, a grader, the learner or a person. This also works while parts of the stack are
    away. Without the store nothing is known of the run: the exit code is then 2.
    """
    from cli.run_screen import print_run

    if run_id is not None:
        print_run(run_id, json)
        return
    found = _collect()
    if json:
        print_json(found)
        return
    print(f"stack in {found['home']}")
    width = max([_WIDTH, *(len(part["name"]) for part in found["parts"])])
    print(_ROW.format("part", "state", "up", "restarts", "address", width=width))
    for part in found["parts"]:
        up = duration_in_words(part["uptime_seconds"]) if part["uptime_seconds"] else ""
        row = (part["name"], part["state"], up, part["restarts"] or "", part["address"])
        print(_ROW.format(*row, width=width).rstrip())
    for part in found["parts"]:
        if part["problem"]:
            print(f"{part['name']}: {part['problem']}")
        elif part["last_error"]:
            print(f"{part['name']}: error before its newest restart: {part['last_error']}")
        elif part["pid"] and part_kind(part["name"]) in ("engine", "learner") and part["detail"]:
            print(f"{part['name']}: {part['detail']}")
    for run in found["runs"]:
        print(f"run {run['run_id']} is {run['state']}, its engines are set {run['engine_set']}")
        if waits_for := run.get("waits_for"):
            waits = f"  waits for: {waits_for}; `ratchet status {run['run_id']}` says more"
            print(textwrap.fill(waits, _LINE_WIDTH, subsequent_indent="  "))
    for line in found["boxes"]:
        print(line)
    if found["note"]:
        print(found["note"])
    print(f"Temporal UI {found['temporal_ui'] or 'not known: RATCHET_TEMPORAL_UI names it'}")


def _collect() -> dict[str, Any]:
    """Collect what is known without asking any part; only Postgres is asked, if it answers, and given two seconds. If
    runs are open, Temporal is asked what the first of them wait for."""
    from stack.engine_parts import engine_addresses
    from stack.part_health import PartHealth, read_fresh_health
    from stack.supervisor import Supervisor

    stack = Stack()
    fresh = read_fresh_health(stack.home)
    health = fresh or {}
    addresses, now = stack.addresses() | engine_addresses(stack), time.time()
    parts = []
    for process in Supervisor(stack).states():
        part = health.get(process.name, PartHealth(process.name))
        is_known = (process.name in health and process.state != "stopped") or part.state == "given_up"
        parts.append(
            {
                "name": process.name,
                "state": part.state.replace("_", " ") if is_known else process.state,
                "process": process.state,
                "pid": process.pid,
                "address": addresses.get(process.name, ""),
                "uptime_seconds": process.uptime_seconds,
                "restarts": part.restarts,
                "state_seconds": now - part.since if is_known else None,
                "problem": part.summary(now) if is_known else process.detail,
                "last_error": part.last_error,
                "detail": part.detail,
            }
        )
    living = {part["name"] for part in parts if part["pid"]}
    note = ""
    if fresh is None and living:
        why = "the watcher has not looked at them lately" if WATCHER in living else "no watcher runs"
        note = f"the parts are not probed: {why}"
    answers = health.get("postgres", PartHealth("postgres")).state in ("answering", "slow")
    of_store = asyncio.run(_open_runs(stack)) if answers else {"runs": [], "boxes": []}
    asyncio.run(_add_waits(stack, of_store["runs"][:_RUNS_EXPLAINED]))
    return {"home": str(stack.home), "temporal_ui": stack.shown_ui, "note": note, "parts": parts, **of_store}


async def _add_waits(stack: Stack, runs: list[dict[str, Any]]) -> None:
    """Add `waits_for` to the runs whose diagnosis is known in time."""
    from stack.run_status import diagnose

    async def add(run: dict[str, Any]) -> None:
        with contextlib.suppress(RatchetError, TimeoutError):
            async with asyncio.timeout(_DIAGNOSIS_SECONDS):
                run["waits_for"] = (await diagnose(stack, run["run_id"])).answer

    await asyncio.gather(*map(add, runs))


async def _open_runs(stack: Stack) -> dict[str, list[Any]]:
    """Return the open runs, and a line for each with an adaptive number of boxes; none if Postgres is late."""
    from store import box_cap, open_runs

    try:
        async with asyncio.timeout(_STORE_SECONDS), stack.database() as database, database.begin() as connection:
            opened = await open_runs.open_sets(connection)
            caps = await box_cap.open_caps(connection)
    except (StoreUnavailableError, TimeoutError):
        return {"runs": [], "boxes": []}
    return {
        "runs": [{"run_id": one.run_id, "state": one.state, "engine_set": one.engine_set} for one in opened],
        "boxes": [f"boxes of {one.run_id}: {one.cap.sentence(one.max_boxes)}" for one in caps],
    }
