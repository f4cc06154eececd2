"""`ratchet images`: what local sandboxes boot, beside the machine's own programs (`host`)."""

from pathlib import Path
from typing import Annotated, Any

import typer

images_app = typer.Typer(name="images", help="Images for local sandboxes: import, list, remove.", no_args_is_help=True)


@images_app.command(name="import")
def import_image(
    source: Annotated[
        Path, typer.Argument(help="A directory, a tar, an OCI layout or archive, a docker-archive; compressed or not.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Its reference, as datasets name it; default: what the archive says.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Unpack an image for boxes; a running gateway sees it at once. Environment, working directory and user are kept.

    `docker save IMAGE -o FILE`, `podman save`, `skopeo copy docker://IMAGE oci-archive:FILE` and `docker export` make such files.
    """
    from cli.console import print_json, say
    from ratchet.errors import ConfigError

    if not source.exists():
        raise ConfigError(f"there is nothing at {source}")
    image = _store().add(source, name, say)
    say(f"{image.reference}: {image.size_bytes / 1e6:.1f} MB at {image.directory}")
    if json:
        print_json(image.model_dump(mode="json"))


@images_app.command(name="list")
def list_images(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """What has been imported. `host` and `base`, the machine's own programs, are always there."""
    from datetime import UTC, datetime

    from cli.console import print_json, print_table

    images = _store().images()
    if json:
        print_json([image.model_dump(mode="json") for image in images])
        return
    rows = [
        [
            image.reference,
            image.digest[:19],
            f"{image.size_bytes / 1e6:.1f}",
            datetime.fromtimestamp(image.imported_at, UTC).strftime("%Y-%m-%d %H:%M"),
            image.source,
        ]
        for image in images
    ]
    print_table("images", ["reference", "digest", "MB", "imported (UTC)", "from"], rows)


@images_app.command(name="remove")
def remove_image(
    references: Annotated[list[str], typer.Argument(help="References, as `ratchet images list` shows them.")],
) -> None:
    """Forget images. Files that boxes still use stay until those have ended."""
    from cli.console import say

    for reference in references:
        removed = _store().remove(reference)
        say(
            f"{reference} removed"
            if removed
            else f"{reference} removed; its files are in use by boxes and go with the next removal"
        )


def _store() -> Any:
    from ratchet import paths
    from sandbox_gateway.image_store import ImageStore

    return ImageStore(paths.images())
