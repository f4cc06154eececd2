"""The settings of one gateway process, as one frozen model. The gateway reads no environment and no config file."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GATEWAY_MARK = "x-ratchet-gateway"
"""Header of `/health` by which clients of this program know its gateway from other services."""
SILENT_HOSTS = "x-ratchet-silent-hosts"  # header of a listing that lacks the boxes of these hosts
Port = Annotated[int, Field(ge=1, le=65_535)]


class GatewaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    root_directory: Path
    """Directory for the boxes' files and records; only one gateway at a time can use it."""
    api_key: str = Field(min_length=1)
    """The key that clients send as X-API-KEY."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8410
    """Port of the control plane and of every box's file and process service."""
    egress_ports: tuple[Port, ...] = ()
    """Ports on the host's 127.0.0.1 that boxes reach at the same address; empty means no network at all."""
    max_boxes: int = Field(default=64, ge=1, le=8192)
    """Maximum number of live boxes; a create beyond it is refused with 503."""
    max_concurrent_boots: int = Field(default=4, ge=1)
    """Number of boots that run in parallel; further ones wait."""
    memory_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Memory limit of one box in bytes, page cache included."""
    max_processes: int = Field(default=512, ge=64)
    """Limit of processes and threads in one box; each single user gets 32 fewer."""
    disk_bytes: int | None = Field(default=8 << 30, ge=16 << 20)
    """Size of one box's private disk in bytes, sparse. None: boxes share the free space of the root directory's disk.
    """
    default_ttl_seconds: int = Field(default=300, ge=1)
    """Time to live, in seconds, of a box whose creator gives none."""
    max_ttl_seconds: int = Field(default=86_400, ge=1)
    """Longest accepted time to live, in seconds."""
    image_metadata_key: str = "image"
    """Metadata key that names the image; without it the template id does."""
    box_id_prefix: str = Field(default="", pattern=r"[a-z0-9]{0,8}")
    """First letters of every box's id after its `i`, by which a front of several gateways knows the box's host."""
    images_directory: Path | None = None
    """Directory of `ratchet tasks images import`; None: only the built-in `host` and `base` exist."""
    layers: dict[str, Path] = Field(default_factory=dict)
    """Box path to host directory, mounted read-only in every box; a `bin` below it is appended to PATH."""
    hidden_directories: tuple[Path, ...] = ()
    """Host directories below /usr that the `host` image must not show, such as a checkout."""
