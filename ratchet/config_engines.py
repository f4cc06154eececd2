"""The engines of a run: their set, how many, on which host, on which GPUs, the address of one that already runs."""

import re
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ratchet.bounded_numbers import NotNegative, Positive
from ratchet.config_sections import Section

LOCAL = "local"
"""The name of the machine on which `ratchet up` runs."""
FIRST_REMOTE_PORT = 18100
DEFAULT_SET = "default"
"""The engine set of a run whose config names none."""
_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,30}")
_NUMBERED = re.compile(r".*-\d+")
"""The part of a set's second engine is called `engine-SET-2`."""


def require_set_name(name: str) -> str:
    """Return the name. Raises ValueError if no engine set can have it."""
    if not _SET_NAME.fullmatch(name) or _NUMBERED.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of an engine set: use at most 31 letters, digits, `-` and `_`, beginning "
            "with a letter and not ending with `-` and a number, which tells the engines of a set apart"
        )
    return name


class PlacedEnginesConfig(Section):
    """Equal engines of one host, or one vLLM server that already runs."""

    address: str | None = None
    """URL of a vLLM server that already runs, such as `http://10.0.0.9:8000`: it is registered and gets the weights of
    every step, and is never started or stopped (docs/fleet.md). None, the default, starts the engines."""
    count: Positive = 1
    """Number of engines that this entry starts."""
    host: str = LOCAL
    """Host of the engines: `local`, the default, is the machine of `ratchet up`; an IP address is that of a node of the
    Ray cluster `RAY_ADDRESS`, on which Ray starts them."""
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """TCP port of the first engine; each further one takes the next port. None, the default, means free ports on
    `local`, and ports from 18100 on another host."""
    gpus: list[NotNegative] | None = None
    """Indexes of the host's GPUs that these engines share out in order, each the same number of them. None, the
    default, takes the first GPUs that no other part was given, as many as the vLLM arguments need."""
    args: tuple[str, ...] = ()
    """vLLM arguments of these engines, passed unchanged after those of `engine.args`, such as
    `[--tensor-parallel-size, "2"]`. Empty by default."""

    @field_validator("address")
    @classmethod
    def _plain_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname or parts.username or parts.path.strip("/") or parts.query:
            raise ValueError("expected an address such as http://10.0.0.9:8000")
        return address.rstrip("/")

    @model_validator(mode="after")
    def _started_or_registered(self) -> Self:
        others = self.model_fields_set - {"address"}
        if self.address is not None and any(getattr(self, name) != _default(name) for name in others):
            raise ValueError("address names a server that already runs, so no other key of its entry has an effect")
        return self


def _default(name: str) -> Any:
    return PlacedEnginesConfig.model_fields[name].default


def engine_entries(value: Any) -> Any:
    """Return a count of engines as the list that it stands for; anything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [{"count": value}]
    return value
