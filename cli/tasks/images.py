"""`ratchet tasks images`: import, build, list and remove the images of sandboxes."""

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import print_found, print_json, print_table, say
from ratchet import paths
from ratchet.config import DatasetConfig
from ratchet.durations import duration_in_words
from ratchet.errors import ConfigError, DatasetError
from stack.parts import Stack

images_app = typer.Typer(
    name="images", help="Import, build, list and remove images for sandboxes.", no_args_is_help=True
)


@images_app.command(name="import")
def import_image(
    source: Annotated[
        Path, typer.Argument(help="A directory, a tar, an OCI layout or archive, a docker-archive; compressed or not.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Reference by which datasets name the image. Default: the archive's own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Unpack an image for sandboxes; a running gateway sees it at once. Its environment, working directory and user
    are kept.

    `docker save IMAGE -o FILE`, `podman save`, `skopeo copy docker://IMAGE oci-archive:FILE` and `docker export` write
    such files.
    """
    if not source.exists():
        raise ConfigError(f"{source} does not exist; name an archive or a directory")
    image = _store().add(source, name, say)
    say(f"{image.reference}: {image.size_bytes / 1e6:.1f} MB at {image.directory}")
    if json:
        print_json(image.model_dump(mode="json"))


@images_app.command(name="build")
def build_images(
    dataset: Annotated[Path, typer.Argument(help="A folder of Harbor tasks, or one of them.")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Build the images of tasks that come with a Dockerfile. Without it each is built when its first box is wanted.

    The stack must be up. An image is named by the digest of its Dockerfile and the files beside it. Exit code 1 if one
    of them cannot be built.
    """
    from client.images import build_dataset_images

    if not dataset.is_dir():
        raise DatasetError(f"{dataset}: is no folder; only tasks in Harbor's format come with Dockerfiles")
    built = asyncio.run(build_dataset_images(Stack(), DatasetConfig(path=str(dataset.resolve())), say))
    if json:
        print_json([asdict(one) for one in built])
    elif not built:
        say("no task of it comes with a Dockerfile")
    else:
        rows = [
            [one.image[:28], ", ".join(one.tasks), one.failure or f"built, {duration_in_words(one.seconds)}"]
            for one in built
        ]
        print_table("images", ["image", "tasks", "result"], rows)
    if any(one.failure for one in built):
        raise typer.Exit(1)


@images_app.command(name="list")
def list_images(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List imported images. `host` and `base`, the machine's own programs, always exist."""
    images = _store().images()
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
    found = [image.model_dump(mode="json") for image in images]
    print_found(found, json, "images", ["reference", "digest", "MB", "imported (UTC)", "from"], rows)


@images_app.command(name="remove")
def remove_image(
    references: Annotated[list[str], typer.Argument(help="References as `ratchet tasks images list` prints them.")],
) -> None:
    """Remove images. Files that running boxes use are deleted after those boxes have ended."""
    for reference in references:
        removed = _store().remove(reference)
        say(
            f"{reference} removed"
            if removed
            else f"{reference} removed; boxes still use its files, which the next removal deletes"
        )


def _store() -> Any:
    from sandbox_gateway.image_store import ImageStore

    return ImageStore(paths.images())
