"""`ratchet down`: ends the local stack."""

from typing import Annotated

import typer


def down(
    boxes: Annotated[
        bool, typer.Option("--boxes", help="End the sandboxes, too; rollouts in flight start new ones later.")
    ] = False,
) -> None:
    """End the local stack; everything stored stays, and `ratchet up` goes on from there."""
    import asyncio

    from cli.console import say
    from ratchet.errors import RatchetError
    from stack.parts import Stack
    from stack.supervisor import Supervisor

    stack = Stack()
    supervisor = Supervisor(stack)
    if boxes and supervisor.is_up() and stack.has_gateway:
        try:
            say(f"{asyncio.run(kill_stack_boxes(stack.environment()))} boxes ended")
        except RatchetError as error:
            say(f"boxes that still run end when their time is up, for the gateway does not end them: {error}")
    supervisor.down()
    say("down")


async def kill_stack_boxes(environment: dict[str, str]) -> int:
    from activities.sandboxes.e2b import E2BProvider

    provider = E2BProvider(environment["E2B_API_KEY"], environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"])
    listed = await provider.list({})
    for info in listed:
        await provider.kill(info.id)
    await provider.close()
    return len(listed)
