"""Write a recipe beside this file: plant bugs one by one in a package's sources and keep those that its tests detect.

The recipes are committed, and so is this generator. Run it from the project's environment, for example `python
datasets/packages/propose.py isodate 0.7.2 SHA256 --import-path src --tests tests`.

Everything runs in a box of the local gateway, with the code that grades: names that pass twice on the original sources
are `passing`; a bug is kept if it breaks at least one of these names and at most a fifth of them, within the time
limit and with a runner that reported truthfully. At most one bug is kept per function, and operators take turns.
"""

import argparse
import asyncio
import hashlib
import json
import random
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.datasets.archives import File, pack_archive
from activities.datasets.bug_planting import Site, find_sites
from activities.datasets.package_recipes import PYTHON, PackageBug, PackageRecipe, recipe_sources
from grading.base import PASSED
from grading.evidence import all_tests, judge_runner, look_up
from grading.run_hidden_tests import RunnerReport, run_tests
from ratchet import paths
from sandboxes.base import Sandbox
from stack.private_gateway import private_gateway

_MAX_SHARE = 0.2
_MAX_SYMPTOMS = 4
_BOX_SECONDS = 3600


def names(observed: RunnerReport) -> dict[str, str]:
    """Return the outcome of every test function: the worst over its parameters."""
    tests = all_tests(observed)
    return {name: look_up(tests, name) for name in {re.split(r"[\[ ]", test, maxsplit=1)[0] for test in tests}}


def symptoms(log: str, broken: list[str]) -> list[str]:
    """Return the runner's line for the first failures, one per function."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        name, _, message = line.removeprefix("FAILED ").partition(" - ")
        function = re.split(r"[\[ ]", name, maxsplit=1)[0]
        if line.startswith("FAILED ") and function in broken and function not in found:
            found[function] = f"{name} - {message}"[:220]
    return list(found.values())[:_MAX_SYMPTOMS]


def candidates(recipe: PackageRecipe, files: dict[str, File], seed: int) -> Iterator[tuple[str, Site]]:
    """Yield sites of the package's own modules in random order, operators in turn, one per function."""
    order = random.Random(f"{recipe.package}{seed}")
    by_operator: dict[str, list[tuple[str, Site]]] = {}
    prefix = "" if recipe.import_path == "." else recipe.import_path + "/"
    for name, file in sorted(files.items()):
        inside = name.startswith(prefix) and not re.search(
            r"(^|/)(docs?|examples?|setup\.py|conftest\.py|tools|bench\w*|_version\.py)(/|$)", name
        )
        if inside and name.endswith(".py") and not recipe.is_test(name):
            for site in find_sites(file.content):
                by_operator.setdefault(site.operator, []).append((name, site))
    for found in by_operator.values():
        order.shuffle(found)
    while by_operator:
        for operator in order.sample(sorted(by_operator), len(by_operator)):
            yield by_operator[operator].pop()
            if not by_operator[operator]:
                del by_operator[operator]


class Workshop:
    """A box that contains the whole package."""

    def __init__(self, box: Sandbox, recipe: PackageRecipe, files: dict[str, File]) -> None:
        self.box = box
        self.recipe = recipe
        self.files = files

    async def unpack(self) -> None:
        await self.box.write_file("/tmp/files.b64", pack_archive(self.files), user="root")
        directory = self.recipe.workdir
        await self.box.exec(
            f"mkdir -p {directory} && base64 -d /tmp/files.b64 | tar -xz -C {directory} && chown -R agent: {directory}",
            user="root",
        )

    async def run(self, seconds: float) -> RunnerReport:
        return await run_tests(self.box, self.recipe.command(PYTHON), self.recipe.workdir, seconds)

    async def with_bug(self, file: str, content: bytes, seconds: float) -> RunnerReport:
        path = f"{self.recipe.workdir}/{file}"
        await self.box.write_file(path, content, user="agent")
        try:
            return await self.run(seconds)
        finally:
            await self.box.write_file(path, self.files[file].content, user="agent")


def reads_a_clock(file: File) -> bool:
    """Return whether a test file compares durations. Its results depend on the machine, so its names are never
    expected.
    """
    return (
        re.search(
            rb"perf_counter|process_time|monotonic\(|time\.time\(|timeit|import perf_utils|from .*perf_utils",
            file.content,
        )
        is not None
    )


async def survey(workshop: Workshop) -> tuple[dict[str, list[str]], float]:
    """Return the names that pass twice on the original sources, and how long a run takes."""
    runs, started = [await workshop.run(600) for _ in range(2)], time.monotonic()
    assert all(judge_runner(one).ok and one.sessions for one in runs), runs[-1].log[-2000:]
    good = [{name for name, outcome in names(one).items() if outcome in PASSED} for one in runs]
    started = time.monotonic()
    await workshop.run(600)
    passing: dict[str, list[str]] = {}
    for name in sorted(good[0] & good[1]):
        file, _, rest = name.partition("::")
        if reads_a_clock(workshop.files[file]):
            continue
        passing.setdefault(file, []).append(rest)
    return passing, time.monotonic() - started


async def bugs(
    workshop: Workshop, passing: dict[str, list[str]], seconds: float, wanted: int, seed: int
) -> list[PackageBug]:
    expected = {f"{file}::{name}" for file, listed in passing.items() for name in listed}
    kept: list[PackageBug] = []
    taken: set[tuple[str, str]] = set()
    for tried, (file, site) in enumerate(candidates(workshop.recipe, workshop.files, seed)):
        if len(kept) == wanted or tried == 12 * wanted:
            break
        if (file, site.function) in taken or any(bug.operator == site.operator for bug in kept):
            continue
        content = site.apply(workshop.files[file].content)
        observed = await workshop.with_bug(file, content, 4 * seconds + 10)
        found = names(observed)
        broken = sorted(name for name in expected if found.get(name) not in PASSED)
        missing = [name for name in broken if name not in found]
        good = (
            observed.exit_code == 1
            and judge_runner(observed).ok
            and 0 < len(broken) <= max(2, _MAX_SHARE * len(expected))
            and not missing
        )
        print(
            f"{file}:{site.line} {site.function} {site.operator}: "
            f"{len(broken)} of {len(expected)}{' kept' if good else ''}",
            file=sys.stderr,
        )
        if good:
            taken.add((file, site.function))
            label = f"{workshop.recipe.package}-{workshop.recipe.version}-{hashlib.sha256(content).hexdigest()[:8]}"
            kept.append(
                PackageBug(
                    label=label, file=file, operator=site.operator, function=site.function, index=site.index,
                    sha256=hashlib.sha256(content).hexdigest(), fail_to_pass=broken,
                    symptoms=symptoms(observed.log, broken),
                )
            )  # fmt: skip
    return kept


async def propose(recipe: PackageRecipe, wanted: int, seed: int) -> PackageRecipe:
    files = recipe_sources(recipe, paths.cache())
    with tempfile.TemporaryDirectory() as directory, private_gateway(Path(directory), max_boxes=2) as provider:
        async with await provider.create(
            "host", ttl_seconds=_BOX_SECONDS, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
        ) as box:
            workshop = Workshop(box, recipe, files)
            await workshop.unpack()
            passing, seconds = await survey(workshop)
            print(
                f"{recipe.package}: {sum(map(len, passing.values()))} names pass, a run takes {seconds:.1f} s",
                file=sys.stderr,
            )
            return recipe.model_copy(
                update={"passing": passing, "bugs": await bugs(workshop, passing, seconds, wanted, seed)}
            )


def written(recipe: PackageRecipe) -> str:
    """Return JSON with one line per test file and one line per fact of a bug."""
    values = recipe.model_dump()
    passing = ",\n".join(
        f"  {json.dumps(file)}: {json.dumps(listed)}" for file, listed in values.pop("passing").items()
    )
    bugs = ",\n".join("  {\n" + _facts(bug, "   ") + "\n  }" for bug in values.pop("bugs"))
    return "{\n" + _facts(values, " ") + f',\n "passing": {{\n{passing}\n }},\n "bugs": [\n{bugs}\n ]\n}}\n'


def _facts(values: dict[str, Any], indent: str) -> str:
    return ",\n".join(
        f"{indent}{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("version")
    parser.add_argument("sha256")
    parser.add_argument("--file", help="the archive's name; default: package-version.tar.gz")
    parser.add_argument("--import-path", default=".")
    parser.add_argument("--tests", action="append", required=True)
    parser.add_argument("--wanted", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    recipe = PackageRecipe(
        package=told.package, version=told.version, sha256=told.sha256,
        file=told.file or f"{told.package}-{told.version}.tar.gz",
        import_path=told.import_path, tests=told.tests,
    )  # fmt: skip
    made = asyncio.run(propose(recipe, told.wanted, told.seed))
    target = Path(__file__).with_name(f"{recipe.package}.json")
    target.write_text(written(made))
    print(f"{target.name}: {len(made.bugs)} bugs", file=sys.stderr)


if __name__ == "__main__":
    main()
