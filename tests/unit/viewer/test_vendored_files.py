"""The vendored libraries are what versions.json records, and each has its licence beside it."""

import json

from scripts.vendor_viewer import PACKAGES, VENDOR, VERSIONS, changed_files


def test_files_are_unchanged_and_licensed() -> None:
    assert changed_files() == []
    record = json.loads(VERSIONS.read_text())
    assert {name: one["version"] for name, one in record.items()} == {one.name: one.version for one in PACKAGES}
    assert all(any(name.endswith(".LICENSE") for name in one["sha256"]) for one in record.values())
    known = {name for one in record.values() for name in one["sha256"]} | {VERSIONS.name}
    assert {path.name for path in VENDOR.iterdir()} == known
