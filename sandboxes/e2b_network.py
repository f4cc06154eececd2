"""The network access of an agent's box at a service with E2B's API: it reaches the adapter and nothing else."""

import ipaddress
from urllib.parse import urlsplit

from ratchet.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost")
_CLOUD_DOMAINS = ("e2b.app", "e2b.dev", "e2b.pro")
_HTTPS_PORT = 443


def hosts_of_agents(api_url: str | None, adapter_url: str) -> list[str] | None:
    """Return the hosts that an agent's box may reach; None for a gateway on this machine, which opens one port itself.

    Raises ConfigError if boxes of the service could not reach the adapter safely: those of E2B's cloud use the
    internet, and its allow list knows names on the ports of HTTP and HTTPS only.
    """
    service = urlsplit(api_url).hostname or "" if api_url else _CLOUD_DOMAINS[0]
    if service in LOOPBACK:
        return None
    adapter = urlsplit(adapter_url)
    host = adapter.hostname or ""
    is_cloud = any(service == domain or service.endswith(f".{domain}") for domain in _CLOUD_DOMAINS)
    passes_allow_list = _is_ip_address(host) or (adapter.port or _HTTPS_PORT) == _HTTPS_PORT
    if not host or (is_cloud and not (adapter.scheme == "https" and passes_allow_list)):
        raise ConfigError(
            f"boxes of {service} reach the adapter over the internet at {adapter_url or 'no address'}: set"
            " ADAPTER_PUBLIC_HOST to its https address on port 443, such as https://adapter.example.com"
        )
    return [host]


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
