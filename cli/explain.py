"""`ratchet explain`: a rollout, a step or a run in a few plain sentences."""

import textwrap
from typing import Annotated, Any

import typer

from cli.console import print_json, print_table
from ratchet.bounded_numbers import ADVICE_STEPS, MAX_ROWS


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A rollout's id or workflow id, RUN@STEP, or RUN; by default the newest run.", metavar="[WHAT]"
        ),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="Of a run: where its hours went, and which setting would change it most.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, max=MAX_ROWS, help="--advice looks at so many of the newest trained steps.")
    ] = ADVICE_STEPS,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say why a rollout has its reward, what a step trained, or how a run is doing.

    Everything is computed from what the store has. --advice also says what a trained token costs.
    """
    from client import Client
    from reads.explanations import explain_thing

    client = Client()
    if advice:
        found = client.run(what).advise(steps).as_json()
        print_json(found) if json else _print_advice(found)
        return
    thing = what or client.run().run_id
    sentences = Client().read(lambda connection: explain_thing(connection, thing))
    if json:
        print_json(sentences)
        return
    for sentence in sentences:
        print(textwrap.fill(sentence, 79, subsequent_indent="  "))


def _print_advice(found: dict[str, Any]) -> None:
    if not found["hours"]:
        print(
            f"run {found['run_id']} has trained no step yet; `ratchet status {found['run_id']}` says what it waits for"
        )
        return
    total = sum(found["hours"].values())
    names = sorted(found["hours"], key=lambda name: -found["hours"][name])
    rows = [
        [
            name,
            f"{found['hours'][name]:.2f}",
            f"{found['hours'][name] / total:.0%}",
            f"{found['causes'].get(name, 0.0) / total:.0%}",
        ]
        for name in names
    ]
    steps = f"{found['num_steps']} of {found['num_trained_steps']} steps"
    size = f"{found['num_rollouts']} rollouts of {steps}, {found['wall_hours']:.2f} h"
    columns = ["phase", "rollout-hours", "share", "waits counted for their cause"]
    print_table(f"{found['run_id']}: {size}", columns, rows)
    print(f"{found['wasted_hours'] / total:.0%} of the rollout-hours are of groups that no step trained")
    if found["wall_hours_per_million_trained_tokens"] is not None:
        print(
            f"{found['num_trained_tokens']} trained tokens; per million: "
            f"{found['wall_hours_per_million_trained_tokens']:.2f} h of the run, "
            f"{found['box_hours_per_million_trained_tokens']:.1f} box-hours; "
            f"{found['sampled_tokens_per_trained_token']:.2f} sampled tokens per trained token"
        )
    print(f"most is due to {found['cause']} ({found['share']:.0%}). What changes it: {found['setting']}")
