"""Only the tests that were put into the box run; honest additions and edits stay."""

import os
import time

import pytest

from grading.diff_sections import FileChange
from grading.patch_screening import LEFT_OUT, PatchPolicy, screen_patch
from grading.task_tests import BaseTree

LISTED = "tests/test_price.py"
BASE = BaseTree(
    files=frozenset(
        {
            "shop/__init__.py",
            "shop/price.py",
            LISTED,
            "tests/helpers.py",
            "tests/test_other.py",
            "tests/unit/test_deep.py",
            "conftest.py",
            "scripts/run.js",
            "scripts/test.sh",
            "package.json",
            "Makefile",
            "tools/plugin.py",
            "pyproject.toml",
            "tests/test_base.py",
            "tests/data/expected.json",
            "ext/a.txt",
        }
    ),
    imports="from shop import total\nfrom tests.helpers import ITEMS\nfrom tests.test_base import Base\n",
    settings={
        "package.json": '{"scripts": {"test": "npm run all", "all": "node scripts/run"}}',
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p tools.plugin"\n',
    },
)


def change(path: str, mode: str = "100644", added: bool | None = None, deleted: bool = False) -> FileChange:
    is_new = path not in BASE.files if added is None else added
    return FileChange(path, b"", is_new, deleted, frozenset({mode}))


def test_an_expected_test_of_the_base_stays_as_it_is() -> None:
    path = "tests/test_other.py"
    for listed in (frozenset({LISTED}), None):
        policy = PatchPolicy(listed, controlled=True, expected=frozenset({path}))
        for own in (change(path, deleted=True), change(path)):
            screened = screen_patch([own, change("tests/test_moved.py")], policy, BASE)
            assert [finding.path for finding in screened.findings] == [path]
            assert [kept.path for kept in screened.kept] == ["tests/test_moved.py"]
        other = [change("tests/test_base.py", deleted=True)]
        assert screen_patch(other, policy, BASE).kept == other


def test_data_of_the_tests_stays_as_it_is_unless_the_gold_patch_changes_it() -> None:
    path = "tests/data/expected.json"
    kept = [change("tests/data/more.json"), change("tests/helpers.py"), change("ext/a.txt"), change("tests/README.md")]
    base = BaseTree(files=BASE.files | {"tests/README.md"})
    for own in (change(path), change(path, deleted=True), change(path, "120000")):
        screened = screen_patch([own, *kept], PatchPolicy(frozenset({LISTED}), controlled=True), base)
        assert [(one.rule, one.path) for one in screened.findings] == [("test_data", path)] and screened.kept == kept
    gold = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-1\n+2\n"
    for spec in ({"gold_patch": gold}, {"integrity": {"allow": ["tests/data/**"]}}):
        policy = PatchPolicy.of_task(spec, {LISTED}, controlled=True)
        assert screen_patch([change(path)], policy, base).findings == []


def rule_of(path: str, mode: str = "100644", controlled: bool = False, **policy: object) -> str:
    """Return `rule: action` of the finding, empty if the file is kept without one."""
    values = {"test_files": frozenset({LISTED}), **policy}
    policy = PatchPolicy(controlled=controlled, **values)  # type: ignore[arg-type]
    screened = screen_patch([change(path, mode)], policy, BASE)
    assert len(screened.kept) + sum(finding.action == LEFT_OUT for finding in screened.findings) == 1
    return "".join(f"{finding.rule}: {finding.action}" for finding in screened.findings)


@pytest.mark.parametrize(
    ("path", "mode", "rule"),
    [
        ("tests/conftest.py", "100644", "conftest"),
        ("conftest.py", "100644", "conftest"),
        ("sitecustomize.py", "100644", "startup_module"),
        ("json.py", "100644", "shadow_module"),
        ("src/ast/__init__.py", "100644", "shadow_module"),
        ("tests/_pytest.so", "100644", "shadow_module"),
        ("node_modules/assert/index.js", "100644", "js_packages"),
        (".npmrc", "100644", "js_packages"),
        ("bin/python3", "100755", "path_shim"),
        ("bin/node", "120000", "path_shim"),
    ],
)
def test_what_runs_in_place_of_the_tests_needs_control_runs(path: str, mode: str, rule: str) -> None:
    assert rule_of(path, mode) == f"{rule}: {LEFT_OUT}"
    assert rule_of(path, mode, controlled=True) == ""


@pytest.mark.parametrize(
    ("path", "mode", "rule"),
    [
        (LISTED, "100644", "listed_test"),
        (LISTED, "120000", "listed_test"),
        ("tests", "120000", "listed_test"),
        ("ext/lib", "160000", "submodule"),
        ("ext/.git/hooks/post-checkout", "100755", "impossible_path"),
        (".git", "100644", "impossible_path"),
        ("a" * 5000, "100644", "impossible_path"),
        ("docs/index.md", "100644", "denied"),
    ],
)
def test_also_with_control_runs_some_files_are_left_out(path: str, mode: str, rule: str) -> None:
    for controlled in (False, True):
        assert rule_of(path, mode, controlled, deny=("docs/**",)) == f"{rule}: {LEFT_OUT}"


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_new.py",
        "tests/builders.py",
        "tests/data/new.json",
        "tests/new/__init__.py",
        "tests/new/test_x.py",
        "tests/test_price.pyi",
        "tests/test_price.md",
        "tests/test_other.py",
        "tests/unit/test_deep.py",
        "shop/helpers.py",
        "shop/test_price.py",
        "shop/conftest_reader.py",
        "shop/types.py",
        "ext/types.py",
        "ext/new/queue.py",
        "shop/data/.env",
        "shop/entry_points.txt",
        "shop/templates/pytest.ini",
        "shop/templates/conftest.py",
        "examples/x/Makefile",
        "shop/env",
        "src/shop/helpers.py",
        "docs/index.md",
        "src/main.go",
    ],
)
def test_honest_files_stay(path: str) -> None:
    assert rule_of(path) == ""


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("tests/helpers.py", "test_support"),
        ("conftest.py", "conftest"),
        ("tests/test_base.py", "test_support"),
        ("scripts/run.js", "runner_program"),
    ],
)
def test_edits_of_what_tests_use_need_control_runs(path: str, rule: str) -> None:
    assert rule_of(path) == f"{rule}: {LEFT_OUT}"
    assert rule_of(path, controlled=True) == ""


@pytest.mark.parametrize(
    "path", ["CMakeLists.txt", "pom.xml", "pytest.ini", "pyproject.toml", "go.mod", ".env", "a.obj"]
)
def test_settings_without_a_rule_are_kept(path: str) -> None:
    assert rule_of(path) == ""


@pytest.mark.parametrize("path", ["Makefile", "GNUmakefile", "package.json"])
def test_the_runners_part_of_a_file_is_restored_unless_control_runs_decide(path: str) -> None:
    for controlled in (False, True):
        screened = screen_patch([change(path)], PatchPolicy(frozenset({LISTED}), controlled=controlled), BASE)
        assert bool(screened.sections) == (not controlled) and screened.kept and not screened.findings


def test_settings_in_a_new_directory_without_tests_are_kept() -> None:
    screened = screen_patch([change("examples/x/Makefile")], PatchPolicy(frozenset({LISTED})), BASE)
    assert screened.kept and not screened.sections


def test_the_script_of_a_command_is_protected_and_the_product_is_not() -> None:
    policy = {"commands": ("bash scripts/test.sh && python shop/price.py",)}
    assert rule_of("scripts/test.sh", **policy) == f"runner_program: {LEFT_OUT}"
    assert rule_of("shop/price.py", **policy) == ""


def test_directories_of_pythonpath_are_on_the_module_path() -> None:
    spec = {"eval_cmd": 'PYTHONPATH="$PWD/ext:." pytest tests'}
    policy = PatchPolicy.of_task(spec, [LISTED])
    assert policy.module_path == ["ext", ""]
    assert screen_patch([change("ext/queue.py")], policy, BASE).findings[0].rule == "shadow_module"


def test_files_that_test_ids_name_are_tests() -> None:
    policy = PatchPolicy.of_task({"swe_bench": {"pass_to_pass": ["tests/test_other.py::test_x"]}}, [LISTED])
    assert screen_patch([change("tests/test_other.py")], policy, BASE).findings[0].rule == "listed_test"


def test_tests_that_the_row_does_not_list_are_those_named_like_tests() -> None:
    assert rule_of("tests/test_other.py", test_files=None) == f"test_support: {LEFT_OUT}"
    assert rule_of("tests/test_new.py", test_files=None) == ""
    assert rule_of("shop/price.py", test_files=None) == ""


@pytest.mark.parametrize(
    "name", ["d\udcff/x.py", "-rf", "two\nlines.py", "'\"$`", "\udcff/conftest.py", "a\0b", "x" * 5000]
)
def test_findings_can_be_stored(name: str) -> None:
    screened = screen_patch([change(name)], PatchPolicy(None, deny=("**/*",)), BASE)
    for finding in screened.findings:
        assert "\0" not in finding.path and finding.path.encode().decode() == finding.path


def test_hostile_names_take_linear_time() -> None:
    deep = ["/".join(["a"] * 180) + f"/{number}.py" for number in range(300)]
    dots = ["." * 250 + f"/{number}.py" for number in range(3000)]
    odd = [os.fsdecode(b"\xff" * 200 + b"/%d" % number) for number in range(3000)]
    started = time.process_time()
    screen_patch([change(path) for path in (*deep, *dots, *odd)], PatchPolicy(frozenset({LISTED})), BASE)
    # A bound of the screen, not a measurement: quadratic matching needs minutes.
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    ("path", "listed", "expected"),
    [
        ("pkg/helpers_test.go", "pkg/price_test.go", True),
        ("other/helpers_test.go", "pkg/price_test.go", False),
        ("pkg/testdata/out.golden", "pkg/price_test.go", True),
        ("internal/testutil/check.go", "pkg/price_test.go", True),
        ("internal/testing/check.go", "pkg/price_test.go", False),
        ("src/test-utils.ts", "src/price.test.ts", True),
        ("src/__snapshots__/price.test.ts.snap", "src/price.test.ts", True),
        ("src/price.ts", "src/price.test.ts", False),
        ("shop/test/client.py", "tests/test_price.py", False),
        ("src/test/java/shop/Helper.java", "src/test/java/shop/PriceTest.java", True),
        ("spec/support/setup.rb", "spec/price_spec.rb", True),
    ],
)
def test_helpers_of_tests_in_directories_of_the_product(path: str, listed: str, expected: bool) -> None:
    base = BaseTree(frozenset({path, listed}), 'import "x/internal/testutil"\nimport { x } from "./test-utils"\n')
    screened = screen_patch([change(path, added=False)], PatchPolicy(frozenset({listed})), base)
    assert [finding.action for finding in screened.findings] == ([LEFT_OUT] if expected else [])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest -q", "conftest"),
        ("pytest -q tests", ""),
        (f"pytest {LISTED}", ""),
        ("run() { pytest $@; }", ""),
        ("make", ""),
    ],
)
def test_a_conftest_anywhere_is_met_by_pytest_without_a_path(command: str, expected: str) -> None:
    assert rule_of("docs/conftest.py", commands=(command,)).partition(":")[0] == expected
