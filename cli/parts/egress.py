"""`ratchet part egress`: connect Docker boxes to the adapter."""

import asyncio

from stack.parts import Stack


def egress() -> None:
    """Open the adapter's port, and no other, in boxes that are containers. Runs beside the Docker daemon, as root."""
    from sandboxes.docker_settings import adapter_address
    from stack.docker_egress import DockerEgress

    # Also on a machine whose own boxes are not Docker's: a daemon's host need not be the adapter's.
    stack = Stack()
    address = adapter_address(stack.environment() | {"ADAPTER_PUBLIC_HOST": stack.adapter_host})
    asyncio.run(DockerEgress(address).run())
