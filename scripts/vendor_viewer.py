"""Copy the viewer's JavaScript and CSS libraries, with their licences, from their npm packages at pinned versions.

    python scripts/vendor_viewer.py           # writes viewer/static/vendor
    python scripts/vendor_viewer.py --check   # exit code 1 if a file differs from what versions.json records

The files are committed, so that the viewer needs neither npm nor a network. `npm pack` downloads a package; nothing of
it is run.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "viewer" / "static" / "vendor"
VERSIONS = VENDOR / "versions.json"


@dataclass(frozen=True)
class NpmPackage:
    """`files`: file in the package → its name here."""

    name: str
    version: str
    files: dict[str, str]


PACKAGES = (
    NpmPackage("htmx.org", "2.0.8", {"dist/htmx.min.js": "htmx.min.js", "LICENSE": "htmx.LICENSE"}),
    NpmPackage("htmx-ext-sse", "2.2.4", {"dist/sse.min.js": "sse.min.js", "LICENSE": "sse.LICENSE"}),
    NpmPackage(
        "idiomorph", "0.7.4", {"dist/idiomorph-ext.min.js": "idiomorph-ext.min.js", "LICENSE": "idiomorph.LICENSE"}
    ),
    NpmPackage(
        "uplot",
        "1.6.32",
        {
            "dist/uPlot.iife.min.js": "uPlot.iife.min.js",
            "dist/uPlot.min.css": "uPlot.min.css",
            "LICENSE": "uPlot.LICENSE",
        },
    ),
)


def unpack(package: NpmPackage, directory: Path) -> dict[str, bytes]:
    """Download the package and return its files by their names here."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
        cwd=directory, check=True, capture_output=True, text=True,
    ).stdout.split()[-1]  # fmt: skip
    with tarfile.open(directory / packed) as archive:
        found = {}
        for source, target in package.files.items():
            member = archive.extractfile(f"package/{source}")
            assert member is not None, f"{package.name} has no file {source}"
            found[target] = member.read()
        return found


def write_all() -> None:
    VENDOR.mkdir(parents=True, exist_ok=True)
    record = {}
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as directory:
            files = unpack(package, Path(directory))
        for name, content in files.items():
            (VENDOR / name).write_bytes(content)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        record[package.name] = {"version": package.version, "sha256": digests}
    VERSIONS.write_text(json.dumps(record, indent=1) + "\n")


def changed_files() -> list[str]:
    """Return the files that are missing or differ from what versions.json records."""
    record = json.loads(VERSIONS.read_text())
    return [
        name
        for package in record.values()
        for name, digest in package["sha256"].items()
        if not (VENDOR / name).is_file() or hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() != digest
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write_all()
        return 0
    changed = changed_files()
    for name in changed:
        print(f"{VENDOR / name} is not what {VERSIONS} records; run python scripts/vendor_viewer.py")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
