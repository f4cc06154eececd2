"""`ratchet watch`: one screen about a run, or the turns of a rollout, renewed while it runs."""

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from cli.train import COLUMNS, with_reward
from ratchet.types import OPEN_STATES

if TYPE_CHECKING:
    from client import Run

_LOOK_SECONDS = 3.0
_NUM_STEPS = 8


def watch(
    what: Annotated[
        str | None, typer.Argument(help="A run or a rollout; by default the newest open run.", metavar="[RUN|ROLLOUT]")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now and end.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Of a rollout: print long messages whole.")] = False,
) -> None:
    """Show a run live: progress, the newest steps, open rollouts by stage, and what it waits for. Ctrl-C ends it.

    Of a rollout its turns are printed as they end: what the agent sent, and what the policy answered.
    """
    from rich.live import Live

    from cli.turn_printer import follow_rollout
    from client import Client
    from store.names import Kind

    if what is not None and (named := Client().find(what, Kind.RUN, Kind.ROLLOUT)).kind is Kind.ROLLOUT:
        follow_rollout(named.id, once, whole)
        return
    run, console = Client().run(what), Console()
    if once or not console.is_terminal:
        console.print(_screen(run))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            row = run.row()
            live.update(_screen(run), refresh=True)
            if row.state not in OPEN_STATES:
                break
            time.sleep(_LOOK_SECONDS)
    console.print(_screen(run))


def _screen(run: "Run") -> RenderableType:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from cli.run_screen import lines_of
    from reads.curves import metrics_by_step, newest_metric_step, rewards_by_step

    async def read(connection: AsyncConnection) -> dict[int, dict[str, float]]:
        last = await newest_metric_step(connection, run.run_id)
        steps = (connection, run.run_id, max(1, last - _NUM_STEPS + 1), last)
        rewards = {one.step: one.mean for one in await rewards_by_step(*steps)}
        return {step: with_reward(found, rewards.get(step)) for step, found in (await metrics_by_step(*steps)).items()}

    return Group(Text("\n".join(lines_of(run.why()))), Text(), _steps_table(run.client.read(read)))


def _steps_table(metrics: dict[int, dict[str, float]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("step", *COLUMNS):
        table.add_column(title, justify="right")
    for step, found in metrics.items():
        table.add_row(
            str(step), *(form.format(found[name]) if name in found else "" for name, form in COLUMNS.values())
        )
    return table
