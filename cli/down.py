"""`ratchet down`: stop the local stack."""

from typing import Annotated

import typer


def down(
    boxes: Annotated[
        bool, typer.Option("--boxes", help="Also stop the sandboxes; rollouts in flight boot new ones later.")
    ] = False,
) -> None:
    """Stop the local stack. Everything stored stays; `ratchet up` continues from there."""
    import asyncio

    from cli.console import say
    from ratchet.errors import RatchetError
    from stack.parts import Stack
    from stack.supervisor import Supervisor

    stack = Stack()
    supervisor = Supervisor(stack)
    if boxes and supervisor.is_up() and stack.has_gateway:
        # First the workers, which would boot boxes behind the listing.
        supervisor.stop(*(part.name for part in stack.parts() if part.name.startswith("worker")))
        try:
            say(f"{asyncio.run(kill_stack_boxes(stack.environment()))} sandboxes stopped")
        except RatchetError as error:
            say(f"could not stop sandboxes ({error}); they expire at their TTL")
    say("stopping the stack; runs that are open go on after `ratchet up`")
    supervisor.down()
    say("the stack is down")


async def kill_stack_boxes(environment: dict[str, str]) -> int:
    from activities.sandboxes.e2b import E2BProvider

    provider = E2BProvider(environment["E2B_API_KEY"], environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"])
    listed = await provider.list({})
    for info in listed:
        await provider.kill(info.id)
    await provider.close()
    return len(listed)
