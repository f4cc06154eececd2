"""What the gateway has to be told, as one frozen model.

Why here: the gateway reads no environment and no config file; whoever starts it decides.
Called by: `ratchet gateway` and the tests build it, `app.py` and `serve.py` read it.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65_535)]


class GatewaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    root_directory: Path
    """Where boxes keep their files and records; one gateway at a time uses it."""
    api_key: str = Field(min_length=1)
    """What clients send as X-API-KEY."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8410
    """Port of the control plane and of every box's file and process service."""
    egress_ports: tuple[Port, ...] = ()
    """Ports on the host's 127.0.0.1 that boxes reach at the same address; empty means no network at all."""
    max_boxes: int = Field(default=64, ge=1, le=8192)
    """Boxes alive at once; one more is refused with 503."""
    max_concurrent_boots: int = Field(default=4, ge=1)
    """Boots that run side by side; others wait in line."""
    memory_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Memory limit of one box, page cache included."""
    max_processes: int = Field(default=512, ge=64)
    """Limit of processes and threads in one box; one user of it gets 32 fewer."""
    disk_bytes: int | None = Field(default=8 << 30, ge=16 << 20)
    """Size of one box's private disk, sparse; None: what the root directory's disk has, shared by all."""
    default_ttl_seconds: int = Field(default=300, ge=1)
    """Life of a box whose creator names none."""
    max_ttl_seconds: int = Field(default=86_400, ge=1)
    """Longest time to live that is accepted."""
    image_metadata_key: str = "image"
    """Metadata key that names the image; without it the template id does."""
    images_directory: Path | None = None
    """Where `ratchet images import` keeps images; None: only the built-in `host` and `base`."""
    layers: dict[str, Path] = Field(default_factory=dict)
    """Box path to a host directory, mounted read-only in every box; a `bin` below it ends its PATH."""
    hidden_directories: tuple[Path, ...] = ()
    """Host directories below /usr that the `host` image must not show, such as a checkout."""
