"""Refuse an address of Postgres that cannot be used, with the part that is wrong, before anything connects to it."""

import os
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from ratchet.errors import ConfigError
from ratchet.storable_values import is_storable

_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_SESSIONS = ("any", "primary", "standby", "read-write", "read-only", "prefer-standby")
_CACHE_SIZE = "prepared_statement_cache_size"
_OPTIONS = {
    "ssl", "host", "port", "user", "password", "database", "passfile", "service",
    "servicefile", "target_session_attrs", _CACHE_SIZE, "timeout",
    "command_timeout", "krbsrvname", "gsslib", "direct_tls", "async_fallback",
}  # fmt: skip
"""The options that the driver accepts in an address; any other makes it fail with an error that lacks the address."""
_ROOT_CERTIFICATE = "PGSSLROOTCERT"
_CERTIFICATES = (_ROOT_CERTIFICATE, "PGSSLCERT", "PGSSLKEY")


def require_usable_address(url: str) -> None:
    """Raise ConfigError, which names the part, if no connection can be made with this address: one for SQLAlchemy."""
    mistake = next(_mistakes(url), None)
    if mistake is not None:
        raise ConfigError(f"RATCHET_DATABASE_URL: {mistake}; expected postgresql://user:password@host:port/name")


def _mistakes(url: str) -> Iterator[str]:
    if not is_storable(url):
        yield "it contains NUL or bytes that are no UTF-8"
        return
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # of a port that is no number
        address = url.rpartition("@")[2].rpartition("://")[2].partition("/")[0].partition("?")[0]
        yield f"the port {address.partition(':')[2]!r} is no number"
        return
    yield from _mistakes_of_hosts(parsed)
    yield from _mistakes_of_options(parsed)
    yield from _missing_certificates(parsed)


def _mistakes_of_hosts(url: URL) -> Iterator[str]:
    several = [one for one in url.normalized_query.get("host", ()) if not one.startswith("/")]  # else a socket
    hosts = [(url.host or "", "" if url.port is None else str(url.port))]
    # A text with more colons is an address of IPv6 without a port.
    hosts += [(one.partition(":")[0], one.partition(":")[2]) if one.count(":") == 1 else (one, "") for one in several]
    hosts += [("", port) for ports in url.normalized_query.get("port", ()) for port in ports.split(",")]
    for host, port in hosts:
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            yield f"the port {port} is no number from 1 to 65535"
        try:
            host.encode("idna")
        except UnicodeError:
            yield f"{host!r} is no name of a host: each part between two dots has 1 to 63 characters"


def _mistakes_of_options(url: URL) -> Iterator[str]:
    options = {name: values[-1] for name, values in url.normalized_query.items()}
    for name in sorted(set(options) - _OPTIONS):
        hint = f" (files of certificates are named by {', '.join(_CERTIFICATES)})" if name.startswith("ssl") else ""
        known = ", ".join(sorted((_OPTIONS - {"ssl"}) | {"sslmode"}))
        yield f"there is no option {name!r}, only {known}{hint}"
    for name, shown, values in (("ssl", "sslmode", _SSL_MODES), ("target_session_attrs",) * 2 + (_SESSIONS,)):
        if name in options and options[name] not in values:
            yield f"{shown} is {options[name]!r} and not one of {', '.join(values)}"
    size = options.get(_CACHE_SIZE, "0")
    if not (size.isascii() and size.isdigit()):
        yield f"{_CACHE_SIZE} is {size!r} and no number"


def _missing_certificates(url: URL) -> Iterator[str]:
    mode = url.normalized_query.get("ssl", ("",))[-1]
    verifies = mode in ("verify-ca", "verify-full")
    if verifies and not os.environ.get(_ROOT_CERTIFICATE):
        default = Path.home() / ".postgresql" / "root.crt"
        if not default.is_file():
            yield f"sslmode is {mode}, and the certificate {default} does not exist: set {_ROOT_CERTIFICATE}"
    for name in _CERTIFICATES:
        path = os.environ.get(name)
        is_read = verifies or (mode == "require" and name != _ROOT_CERTIFICATE)
        if path and is_read and not Path(path).is_file():
            yield f"sslmode is {mode}, and {name} names {path}, which is no file"
