"""A preparation that fails with a patch and works without it is the patch's fault; paths may be any bytes."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from grading import git_scripts
from grading.base import TestFiles
from grading.grading_box import BoxPreparation
from grading.run_hidden_tests import UnusableBoxError, run_tests
from ratchet.errors import GraderFailedError
from sandboxes.base import Sandbox
from tests.integration.grading import shop
from tests.integration.grading.conftest import Judge

pytestmark = pytest.mark.timeout(600)
WORKDIR = "/workspace/shop"
FIX: shop.Edits = {"shop/price.py": shop.TOTAL + shop.FIX}


async def test_a_directory_where_an_unlisted_test_goes_is_the_patchs_fault(
    judged: Judge, tree: Path, test_patch: str
) -> None:
    archive = shop.archive({shop.TESTS: shop.HIDDEN_TESTS, "tests/extra.txt": "1\n"})
    task = shop.task("eval_cmd", test_patch, tests_archive=archive)
    verdict = (await judged(task, shop.diff(tree, {**FIX, "tests/extra.txt/x.md": "1\n"}))).verdict
    assert not verdict.solved and "can be put in without the patch, but not with it" in verdict.reason


async def test_tests_that_cannot_be_put_in_at_all_are_no_verdict(judged: Judge, tree: Path, test_patch: str) -> None:
    task = shop.task("swe_bench", test_patch.replace("def test_total", "def test_other_name"))
    with pytest.raises(GraderFailedError, match="could not be put in"):
        await judged(task, shop.diff(tree, FIX))


async def test_the_base_is_whole_again_without_the_patch(box: Sandbox, tree: Path) -> None:
    """The second preparation begins with the files of the base commit, and with no others."""
    task = shop.task("eval_cmd", "")
    preparation = BoxPreparation(box, task, 300)
    patch = shop.diff(tree, {**FIX, "new/deep/file.txt": "1\n", "README.md": None, "tests/helpers.py": Path("/etc")})
    commands = ("test ! -e new && ls -R > /tmp/listing && git -c safe.directory='*' status --porcelain > /tmp/status",)
    prepared = await preparation.run(TestFiles(commands=commands), None, patch, controlled=True)
    assert prepared.blame and prepared.applies
    assert "README.md" in (await box.read_file("/tmp/listing")).decode()
    assert not (await box.exec(f"cd {WORKDIR} && find . -newer /tmp/listing -name file.txt")).stdout


async def test_what_a_build_could_take_as_made_is_older_than_all_sources(box: Sandbox, tree: Path) -> None:
    new: shop.Edits = {
        "made.bin": b"\x7fELF\0\0",
        "stamp": b"",
        "program": "#!/bin/sh\n",
        "link.txt": Path("README.md"),
        "new source.c": "int x;\n",
        "price.o": b"INPUT(made.bin)\n",
        "lib/made.o": b"\x7fELF\0\0",
    }
    patch = shop.diff(tree, {**FIX, **new}, ("program",))
    prepared = await BoxPreparation(box, shop.task("eval_cmd", ""), 300).run(TestFiles(), None, patch)
    assert not prepared.findings
    listed = (await box.exec(f"cd {WORKDIR} && find . -path ./.git -prune -o -type f -print -o -type l -print")).stdout
    older = (
        await box.exec(f"cd {WORKDIR} && find . -path ./.git -prune -o ! -newermt 2001-01-01 ! -type d -print")
    ).stdout
    assert sorted(older.split("\n")) == [
        "",
        "./lib/made.o",
        "./link.txt",
        "./made.bin",
        "./price.o",
        "./program",
        "./stamp",
    ], listed


async def test_paths_are_bytes(box: Sandbox, tree: Path) -> None:
    """Settings are restored and tests protected below any name."""
    odd = os.fsdecode(b"-d\xff 'x' $HOME\n")
    files = {
        f"{odd}/tests/test_odd.py": "1\n",
        f"{odd}/Makefile": "test:\n\tpytest\n",
        f"{odd}/conftest.py": "X = 1\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    await box.write_file("/tmp/odd.tar.gz", buffer.getvalue())
    task = shop.task("eval_cmd", "")
    task.spec["pre_commands"].append("tar -xzf /tmp/odd.tar.gz")
    changed: shop.Edits = {
        f"{odd}/Makefile": "build:\n\tcc\n\ntest:\n\ttrue\n",
        f"{odd}/conftest.py": "X = 2\n",
        f"{odd}/tests/test_odd.py": "2\n",
        f"{odd}/product.py": "x = 1\n",
    }
    patch = shop.diff(tree, {**FIX, **changed}, more_base=files)
    prepared = await BoxPreparation(box, task, 300).run(TestFiles(frozenset({f"{odd}/tests/test_odd.py"})), None, patch)
    assert prepared.applies and not prepared.blame, prepared
    assert {finding.rule for finding in prepared.findings} == {
        "listed_test",
        "conftest",
        "make_targets",
    }
    script = f"cd {WORKDIR} && cd -- ./-d*/ && cat Makefile conftest.py tests/test_odd.py product.py"
    script += " && stat -c '%U %a' tests tests/*.py"
    found = (await box.exec(script, user="agent")).stdout
    assert found == "build:\n\tcc\n\ntest:\n\tpytest\nX = 1\n1\nx = 1\nroot 1777\nroot 644\n", found


async def test_thousands_of_settings_files(box: Sandbox, tree: Path) -> None:
    """Their list is longer than an argument of a program may be."""
    names = [f"{'long-directory-name-' * 12}{number}/package.json" for number in range(600)]
    assert sum(len(name) for name in names) > 1 << 17, "the longest argument on Linux"
    task = shop.task("eval_cmd", "")
    base = {name.replace("package.json", "base"): "1\n" for name in names}
    task.spec["pre_commands"].append(shop.unpack_command(base))
    patch = shop.diff(tree, {name: '{"scripts": {"test": "true"}}\n' for name in names}, more_base=base)
    prepared = await BoxPreparation(box, task, 300).run(TestFiles(frozenset({shop.TESTS})), None, patch)
    assert prepared.applies and not prepared.blame, prepared.blame
    assert len(prepared.findings) == len(names)
    assert not (await box.exec(f"cd {WORKDIR} && grep -rl true --include package.json . | head -1", check=False)).stdout


def test_a_path_list_is_bytes() -> None:
    assert git_scripts.path_list(["a b", "\udcff\n", "-rf"]) == b"./a b\0./\xff\n\0./-rf\0"


async def test_the_cpu_time_of_the_tests_is_reported(box: Sandbox) -> None:
    await box.exec(git_scripts.prepare_script("/workspace/shop", [], None, keep_history=True), user="root")
    spin = "for n in 1 2; do timeout 1 bash -c 'while :; do :; done'; done"
    for command, limit in ((f"{spin}; exit 3", 60.0), (f"{spin}; sleep 60", 8.0)):
        report = await run_tests(box, command, "/workspace/shop", limit)
        assert report.exit_code == (3 if limit == 60.0 else None) and 0.2 < report.cpu_seconds < 6, report


ESCAPES = r"""
sleep 3001 &
(setsid sleep 3001 &)
nohup setsid -f sh -c 'trap : TERM HUP INT; sleep 3001'
setsid setsid -f bash -c 'exec -a "x) S 1 1 1 (" sleep 3001'
python3 -c 'import ctypes, time; ctypes.CDLL(None).prctl(15, b"x) *\n", 0, 0, 0); time.sleep(3001)' 3001 &
for n in 1 2 3 4 5 6 7 8; do bash -c 'while :; do sleep 3001 & wait; done' & done
sleep 1
echo "is $(id -un)"
"""
LEFT = r"for one in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$one; echo; done 2>/dev/null | grep -c ' 3001 $' || true"


@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_all_processes_of_the_tests_are_dead_before_the_report(box: Sandbox, user: str) -> None:
    await box.exec(git_scripts.prepare_script("/workspace/shop", [], None, user=user), user="root")
    older = (await box.exec("setsid sleep 4002 >/dev/null 2>&1 & echo $!", user="root")).stdout.strip()
    for end, limit in (("exit 3", 60.0), ("sleep 3001", 5.0)):
        report = await run_tests(box, ESCAPES + end, "/workspace/shop", limit, user=user)
        assert not report.lost and report.exit_code == (3 if limit == 60.0 else None), report
        assert f"is {user}" in report.log
        assert (await box.exec(LEFT, user="root")).stdout == "0\n"
    assert (await box.exec(f"kill -0 {older}", user="root", check=False)).exit_code == 0


async def test_a_user_whom_the_image_lacks_is_named(box: Sandbox) -> None:
    await box.exec(git_scripts.prepare_script("/workspace/shop", [], None), user="root")
    with pytest.raises(UnusableBoxError, match=r"tester.*no such user"):
        await run_tests(box, "true", "/workspace/shop", 60, user="tester")


async def test_go_prints_its_results_whatever_the_command_sets(box: Sandbox) -> None:
    await box.exec(git_scripts.prepare_script("/workspace/shop", [], None), user="root")
    for command, flags in (
        ("true", "-v"),
        ("export GOFLAGS=-mod=mod", "-v -mod=mod"),
        ("export GOFLAGS='-mod=mod -x'", "-v -mod=mod -x"),
        ("GOFLAGS= GOPATH=/go", "-v "),
        ("eval 'GOFLAGS=-x GOPATH=/go'", "-x"),
    ):
        report = await run_tests(box, f'{command}; echo "[$GOFLAGS]"', "/workspace/shop", 60)
        assert report.log == f"[{flags}]\n", command
    assert (await run_tests(box, 'echo "[$GOFLAGS]"', "/workspace/shop", 60, witness=False)).log == "[]\n"
