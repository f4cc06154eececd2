"""The back ends by name: the one that the environment chooses, and what builds images for its boxes."""

import os

from ratchet import paths
from ratchet.errors import ConfigError
from ratchet.import_path import import_object
from ratchet.temporal_settings import positive_number
from sandboxes import docker_settings
from sandboxes.base import ImageBuilder, SandboxProvider
from sandboxes.class_provider import ClassProvider
from sandboxes.e2b import E2BProvider, image_metadata_key


def sandbox_provider() -> SandboxProvider:
    """Return the provider that the environment names.

    Without RATCHET_SANDBOX_PROVIDER it is the E2B SDK's target: E2B cloud, a self-hosted fleet, or the local gateway.
    `docker` is the daemon at DOCKER_HOST, else the local one; `package.module:function` is what that function returns,
    and `package.module:Class` a class of boxes.
    """
    kind = os.environ.get("RATCHET_SANDBOX_PROVIDER") or "e2b"
    if docker_settings.is_chosen():
        from sandboxes.docker import DockerProvider

        max_ttl_seconds = positive_number("RATCHET_SANDBOX_MAX_TTL_SECONDS", 86_400)
        return DockerProvider(
            network=docker_settings.own_network(),
            adapter=docker_settings.adapter_address(),
            max_ttl_seconds=max_ttl_seconds,
        )
    if kind != "e2b":
        return _own_provider(kind)
    return E2BProvider(
        api_key=os.environ.get("E2B_API_KEY", ""),
        api_url=os.environ.get("E2B_API_URL"),
        sandbox_url=os.environ.get("E2B_SANDBOX_URL"),
        image_metadata_key=image_metadata_key(),
        template=os.environ.get("RATCHET_SANDBOX_TEMPLATE") or "base",
        max_ttl_seconds=positive_number("RATCHET_SANDBOX_MAX_TTL_SECONDS", 86_400),
        adapter_url=adapter_url(),
        open_network=bool(os.environ.get("RATCHET_SANDBOX_OPEN_NETWORK")),
    )


def image_builder() -> ImageBuilder | None:
    """Return what builds images for the boxes of `sandbox_provider`; None for a provider of the user's own."""
    from sandboxes.e2b_image_builder import E2BImageBuilder
    from sandboxes.image_builders import DockerImageBuilder, LocalImageBuilder

    if docker_settings.is_chosen():
        return DockerImageBuilder()
    if os.environ.get("RATCHET_SANDBOX_PROVIDER", "e2b") not in ("", "e2b"):
        return None
    key, url = os.environ.get("E2B_API_KEY", ""), os.environ.get("E2B_API_URL")
    return E2BImageBuilder(key, url, LocalImageBuilder(paths.images()))


def _own_provider(path: str) -> SandboxProvider:
    try:
        if ":" not in path:
            raise ImportError("it is neither e2b nor docker, nor an import path like `my_package.boxes:make_provider`")
        made = import_object(path)
        if isinstance(made, type) and hasattr(made, "exec"):
            return ClassProvider(made, path, positive_number("RATCHET_SANDBOX_MAX_TTL_SECONDS", 86_400))
        provider: SandboxProvider = made()
    except ImportError as error:
        raise ConfigError(f"RATCHET_SANDBOX_PROVIDER: {path!r} cannot be used: {error}") from error
    return provider


def adapter_url() -> str:
    """Return the adapter's URL as a box reaches it; ADAPTER_PUBLIC_HOST may be a whole URL."""
    public = os.environ.get("ADAPTER_PUBLIC_HOST") or ""
    if public.startswith(("http://", "https://")) and not docker_settings.needs_egress():
        return public.rstrip("/")
    host, _, port = docker_settings.adapter_address().rpartition(":")
    return f"http://{'127.0.0.1' if docker_settings.needs_egress() else host}:{port}"
