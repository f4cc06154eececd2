"""The names of images that are built from a task's Dockerfile."""

_REPOSITORY = "ratchet-build"


def built_image(digest: str) -> str:
    """Return the reference of the image whose build context has this sha256 digest in hex."""
    return f"{_REPOSITORY}:{digest}"


def is_built(image: str) -> bool:
    """Return whether the image is built from a Dockerfile, so that a service which lacks it may get it."""
    return image.startswith(f"{_REPOSITORY}:")


def build_workflow_id(image: str) -> str:
    """Return the id of the workflow that builds the image, without an installation's prefix."""
    return f"image/{image.removeprefix(f'{_REPOSITORY}:')}"
