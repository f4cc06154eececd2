"""`ratchet egress`: connect Docker boxes to the adapter."""

import asyncio

from stack.parts import Stack


def egress() -> None:
    """Open the adapter's port, and no other, in boxes that are containers. Runs beside the Docker daemon, as root."""
    from activities.sandboxes.docker_settings import adapter_address
    from stack.docker_egress import DockerEgress

    asyncio.run(DockerEgress(adapter_address(Stack().environment())).run())
