"""The vendored libraries are what SHA256SUMS records, and each has its licence beside it."""

import hashlib
from pathlib import Path

VENDOR = Path(__file__).parents[3] / "viewer" / "static" / "vendor"


def test_files_are_unchanged_and_licensed() -> None:
    recorded = dict(line.split()[::-1] for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in VENDOR.iterdir() if path.name != "SHA256SUMS"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == recorded
    libraries = {name.partition(".")[0].partition("-")[0] for name in recorded if not name.endswith(".LICENSE")}
    assert all(f"{name}.LICENSE" in recorded for name in libraries)
