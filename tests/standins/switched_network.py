"""The local gateway's boxes as those of a service that can close the network of a living box: only what it is asked for
is recorded, since the gateway has no network to open. In a box, `/run/network` has what it was made with, and how it
was closed."""

import os
from collections.abc import Mapping
from typing import Any

from sandboxes.base import Network, OpenedFirst
from sandboxes.e2b import E2BProvider, E2BSandbox


class SwitchedProvider(E2BProvider):
    """`given`: the networks that boxes get otherwise than asked with OpenedFirst. `closed`: the calls that close."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self.given: dict[bool, bool] = {}
        self.closed: list[bool] = []

    async def create(self, image: str, *, network: Network = True, **options: Any) -> E2BSandbox:
        given = self.given.get(network.then, network.then) if isinstance(network, OpenedFirst) else network is not False
        box = await super().create(image, network=given, **options)
        await box.write_file("/run/network", f"{network}\n")
        return box

    def _box(self, row: Mapping[str, Any]) -> E2BSandbox:
        made = super()._box(row)
        return _SwitchedBox(made.sdk, self._plane, self._policy, self.closed)


class _SwitchedBox(E2BSandbox):
    """A box that writes down what its network becomes."""

    def __init__(self, sdk: Any, plane: Any, policy: Any, closed: list[bool]) -> None:
        super().__init__(sdk, plane, policy)
        self._closed = closed

    async def set_network(self, network: bool) -> None:
        self._closed.append(network)
        await self.exec(f"echo {network} >> /run/network")


def make_provider() -> SwitchedProvider:
    return SwitchedProvider(
        os.environ["E2B_API_KEY"], os.environ["E2B_API_URL"], os.environ["E2B_SANDBOX_URL"], max_ttl_seconds=86_400
    )
