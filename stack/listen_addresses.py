"""Compare on which host and port engines listen if one machine has several names."""

import contextlib
import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from ratchet.config_engines import FIRST_REMOTE_PORT, LOCAL
from ratchet.errors import ConfigError

_HTTP_PORT = 80


class ListenAddress(NamedTuple):
    """Host, which is `local` for every name of this machine, and TCP port."""

    host: str
    port: int


def own_hosts() -> frozenset[str]:
    """Return the names and IP addresses of this machine."""
    found = {socket.gethostname().lower()}
    for addresses in psutil.net_if_addrs().values():
        found |= {one.address.partition("%")[0] for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)}
    return frozenset(found)


def listen_address(host: str, port: int, own: Collection[str] = ()) -> ListenAddress:
    """Return the address in the one form that is compared. `own`: further names of this machine."""
    name = host.lower().strip("[]")
    is_own = name in (LOCAL, "localhost") or name in own
    with contextlib.suppress(ValueError):  # a name
        is_own = is_own or ipaddress.ip_address(name).is_loopback
    return ListenAddress(LOCAL if is_own else name, port)


def address_of_url(url: str, own: Collection[str] = ()) -> ListenAddress:
    """Return the address of a server's URL."""
    parts = urlsplit(url)
    return listen_address(parts.hostname or "", parts.port or _HTTP_PORT, own)


def named_ports(entries: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the ports of this machine that these entries of `engines` name, as the plan's file holds them."""
    own, found = own_hosts(), set()
    for entry in entries:
        if entry.get("address"):
            first, count = address_of_url(entry["address"], own), 1
        else:
            host, port = entry.get("host", LOCAL), entry.get("port")
            first = listen_address(host, port or (0 if host == LOCAL else FIRST_REMOTE_PORT), own)
            count = entry["count"]
        if first.host == LOCAL and first.port:
            found |= set(range(first.port, first.port + count))
    return found


def require_own_addresses(addresses: Mapping[str, ListenAddress]) -> None:
    """Raise ConfigError if two engines have one address. `addresses`: of each engine's part."""
    parts: dict[ListenAddress, list[str]] = {}
    for part, address in addresses.items():
        parts.setdefault(address, []).append(part)
    for (host, port), names in parts.items():
        if len(names) > 1:
            raise ConfigError(
                f"engines: port {port} of {host} is given to {len(names)} engines ({', '.join(names)}); give each "
                "entry its own port or address"
            )
