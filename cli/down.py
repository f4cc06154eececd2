"""`ratchet down`: stop the local stack."""

import asyncio
from collections.abc import Collection
from typing import Annotated

import typer

from cli.console import say
from ratchet.errors import RatchetError
from stack.parts import Stack

_END_SECONDS = 10.0


def down(
    boxes: Annotated[
        bool, typer.Option("--boxes", help="Also stop the sandboxes; rollouts in flight boot new ones later.")
    ] = False,
) -> None:
    """Stop the local stack. Everything stored stays; `ratchet up` continues from there.

    Sandboxes of open rollouts run on until their time to live, so that their agents' work is not lost: after `ratchet
    up` the rollouts go on in them.
    """
    from activities.box_lifecycle import INSTALLATION_KEY
    from sandbox_gateway.box_end import kill_processes, living_boxes, metadata_of
    from stack.supervisor import Supervisor

    stack = Stack()
    supervisor = Supervisor(stack)
    own_ids: Collection[str] | None = None
    if boxes and supervisor.is_up() and stack.has_gateway:
        # First the workers, which would boot boxes behind the listing.
        supervisor.stop(*(part.name for part in stack.parts() if part.name.startswith("worker")))
        try:
            num_killed, own_ids = asyncio.run(kill_stack_boxes(stack.environment()))
            say(f"{num_killed} sandboxes stopped")
        except RatchetError as error:
            say(f"could not stop sandboxes ({error}); they expire at their TTL")
    say("stopping the stack; runs that are open go on after `ratchet up`")
    supervisor.down()
    living = living_boxes(stack.home / "boxes")
    if boxes:  # those that the gateway has not ended, also if it was down before
        own = [one for one in living if own_ids is None or metadata_of(one).get(INSTALLATION_KEY) in own_ids]
        living = [directory for directory in own if kill_processes(directory, _END_SECONDS)]
    say("the stack is down" + _left(len(living), boxes))


def _left(number: int, is_asked: bool) -> str:
    """Return what is said of sandboxes whose processes live. `is_asked`: they were to end."""
    if not number:
        return ""
    if is_asked:
        return f"; {number} sandboxes could not be ended yet; `ratchet up` and `ratchet down --boxes` try again"
    return (
        f"; sandboxes of open rollouts run on until their time to live ({number}): `ratchet up` goes on with them, "
        "`ratchet down --boxes` ends them"
    )


async def kill_stack_boxes(environment: dict[str, str]) -> tuple[int, Collection[str]]:
    """Kill the boxes that carry this installation's id; return their number, and the ids that are its own. Others may
    use the same gateway."""
    from activities.box_lifecycle import INSTALLATION_KEY, kill_own_box
    from sandboxes.e2b import E2BProvider
    from store import installations
    from store.database import Database

    provider = E2BProvider(environment["E2B_API_KEY"], environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"])
    database = Database(environment["RATCHET_DATABASE_URL"], pool_size=1, is_patient=True)
    num_killed = 0
    try:
        own_ids = (await database.run(installations.installation)).own_ids
        for own_id in own_ids:
            for info in await provider.list({INSTALLATION_KEY: own_id}):
                end = await kill_own_box(database, provider, info.id)
                num_killed += end.is_over and not end.left_to
    finally:
        await database.close()
        await provider.close()
    return num_killed, own_ids
