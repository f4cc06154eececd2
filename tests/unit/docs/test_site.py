"""The site of docs/ builds, without a broken link or anchor."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def build(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copied(all_pages: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(all_pages, tmp_path, dirs_exist_ok=True))


def test_the_site_builds_and_every_page_is_in_it(copied: Path) -> None:
    built = build(copied)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(copied / "docs").with_suffix(".html") for path in (copied / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(copied / ".site") for path in (copied / ".site").rglob("*.html")}
    menu = (ROOT / "mkdocs.yml").read_text()
    missing = [str(page.with_suffix(".md")) for page in pages if str(page.with_suffix(".md")) not in menu]
    assert missing == [], "pages without an entry in the site's menu"


@pytest.mark.parametrize("link", ["[x](nothing.md)", "[x](reference/glossary.md#no-such-heading)"])
def test_a_broken_link_fails_the_build(copied: Path, link: str) -> None:
    with (copied / "docs" / "index.md").open("a") as page:
        page.write(f"\n{link}\n")
    built = build(copied)
    assert built.returncode != 0 and "does not exist" in built.stdout + built.stderr
