"""All pages: a copy of those that are written by hand, with the generated ones beside them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def all_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("reference"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml"):
        shutil.copy(ROOT / name, root)
    subprocess.run([sys.executable, "scripts/generate_pages.py", "--root", str(root)], cwd=ROOT, check=True)
    return root
