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


def rule_of(path: str, mode: str = "100644", controlled: bool = False, **policy: object) -> str:
    """Return `rule: action` of the finding, empty if the file is kept without one."""
    values = {"test_files": frozenset({LISTED}), **policy}
    policy = PatchPolicy(controlled=controlled, **values)  # type: ignore[arg-type]
    screened = screen_patch([change(path, mode)], policy, BASE)
    assert len(screened.kept) + sum(finding.action == LEFT_OUT for finding in screened.findings) == 1
    return "".join(f"{finding.rule}: {finding.action}" for finding in screened.findings)


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_price/__init__.py",
        "tests/test_price/x.py",
        "tests/test_price.so",
        "tests/test_price.pyc",
        "tests/Test_Price.py",
        "tests/test_price.cpython-311-x86_64-linux-gnu.so",
        "tests/conftest/__init__.py",
        "tests/conftest.so",
        "tests/__init__.py",
        "conftest/__init__.py",
        "test_price.py",
        "src/test_price.py",
        "lib/tests/test_price.py",
        "src/tests/__init__.py",
        "tests.py",
        "helpers.py",
        "tests/helpers/__init__.py",
        "src/conftest.py",
        "test_price/__init__.py",
        "helpers/__init__.py",
    ],
)
def test_nothing_takes_the_place_of_a_test(path: str) -> None:
    assert rule_of(path) in (f"test_place: {LEFT_OUT}", f"bytecode: {LEFT_OUT}")
    assert rule_of(path, controlled=True) == ""


@pytest.mark.parametrize(
    "path",
    ["tests/test_evil/conftest.py", "tests/conftest.py", "tests/unit/conftest.py", "tests/pytest.ini", "tests/shop.py"],
)
def test_nothing_new_is_loaded_by_the_tests(path: str) -> None:
    assert LEFT_OUT in rule_of(path)
    assert rule_of(path, controlled=True) == ""


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
        ("tests/data/expected.json", "test_support"),
        ("scripts/run.js", "runner_program"),
        ("tools/plugin.py", "runner_program"),
    ],
)
def test_edits_of_what_tests_use_need_control_runs(path: str, rule: str) -> None:
    assert rule_of(path) == f"{rule}: {LEFT_OUT}"
    assert rule_of(path, controlled=True) == ""


@pytest.mark.parametrize("path", ["CMakeLists.txt", "pom.xml", "shop/build.rs", "Gemfile", "tsconfig.json", "go.mod"])
def test_build_files_are_restored_or_need_control_runs(path: str) -> None:
    policy = PatchPolicy(frozenset({LISTED}))
    screened = screen_patch([change(path)], policy, BASE)
    assert screened.sections or screened.findings[0].action == LEFT_OUT
    assert rule_of(path, controlled=True) == ""


def test_the_script_of_a_command_is_protected_and_the_product_is_not() -> None:
    policy = {"commands": ("bash scripts/test.sh && python shop/price.py",)}
    assert rule_of("scripts/test.sh", **policy) == f"runner_program: {LEFT_OUT}"
    assert rule_of("shop/price.py", **policy) == ""


def test_directories_of_pythonpath_are_on_the_module_path() -> None:
    spec = {"eval_cmd": 'PYTHONPATH="$PWD/ext:." pytest tests'}
    policy = PatchPolicy.of_task(spec, [LISTED])
    assert policy.module_path == ["ext", ""]
    assert screen_patch([change("ext/queue.py")], policy, BASE).findings[0].rule == "shadow_module"
    assert screen_patch([change("ext/test_price.py")], policy, BASE).findings[0].rule == "test_place"


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


@pytest.mark.parametrize("text", ["func TestMain(m *testing.M) {}", "func /* x */ TestMain(", "func\tTestMain ("])
def test_a_new_main_of_go_tests_is_left_out(text: str) -> None:
    added = FileChange("pkg/a_test.go", f"@@ -0,0 +1 @@\n+{text}\n".encode(), True, False, frozenset({"100644"}))
    screened = screen_patch([added], PatchPolicy(frozenset({"pkg/price_test.go"})), BaseTree())
    assert [finding.rule for finding in screened.findings] == ["test_main"]


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


def test_a_file_that_a_makefile_includes_is_protected() -> None:
    settings = {"Makefile": "-include build/config.inc\ntest:\n\tx\n"}
    base = BaseTree(frozenset({"Makefile", "build/config.inc"}), "", settings)
    screened = screen_patch([change("build/config.inc", added=False)], PatchPolicy(frozenset({LISTED})), base)
    assert [finding.rule for finding in screened.findings] == ["runner_program"]


@pytest.mark.parametrize(
    ("path", "rule"),
    [("tests/test_evil", "test_place"), ("conftest", "test_place"), ("docs/link.md", ""), ("tests", "listed_test")],
)
def test_links(path: str, rule: str) -> None:
    """A link to a directory brings the files below it to the place of the link."""
    assert rule_of(path, mode="120000").partition(":")[0] == rule


_TEXT = b"diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+"


@pytest.mark.parametrize(
    ("raw", "mode", "expected"),
    [
        (_TEXT + b"v 100 0 0\n+GIT binary patch\n", "100644", ""),
        (_TEXT + b"greeting = Ol\xe1\n", "100644", ""),
        (b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n", "100644", ""),
        (_TEXT + b"\x7fELF\0\0\n", "100644", "compiled"),
        (b"diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 6\nNcmb\n\n", "100644", "compiled"),
        (_TEXT + b"data/blob.bin\n\\ No newline at end of file\n", "120000", "compiled"),
    ],
)
@pytest.mark.parametrize("path", ["assets/unit.obj", "shop/locale/messages.hi", "data/energy.lib", "libprice.so"])
def test_a_text_with_the_name_of_an_output_is_kept(path: str, raw: bytes, mode: str, expected: str) -> None:
    added = FileChange(path, raw, True, False, frozenset({mode}))
    screened = screen_patch([added], PatchPolicy(frozenset({LISTED})), BASE)
    assert [finding.rule for finding in screened.findings] == ([expected] if expected else [])


_LIBRARY_BASES = {
    "the library": ["src/main/java/org/mockito/Mockito.java", "src/main/java/org/mockito/internal/util/A.java"],
    "an extension": ["src/main/kotlin/org/mockito/kotlin/Mockito.kt", "src/test/java/org/mockito/SpecTest.java"],
    "a user": ["src/main/java/shop/Price.java", "src/main/resources/org/mockito/settings.properties"],
}


@pytest.mark.parametrize(
    ("path", "kept_in"),
    [
        ("src/main/java/org/mockito/Fresh.java", ["the library"]),
        ("src/test/java/org/mockito/FreshTest.java", ["the library", "an extension"]),
        ("src/main/java/org/mockito/internal/fresh/B.java", ["the library"]),
        ("fresh/src/main/java/org/mockito/fresh/deep/B.java", ["the library"]),
        ("src/main/kotlin/org/mockito/kotlin/fresh/B.kt", ["the library", "an extension"]),
        ("src/main/java/org/mockito/internal/progress/ThreadSafe.java", ["the library"]),
        ("src/main/java/org/junit/Assert.java", []),
        ("src/main/java/org/mockito/x/org/junit/Assert.java", []),
        ("src/main/java/shop/Fresh.java", list(_LIBRARY_BASES)),
    ],
)
def test_packages_that_the_base_defines_are_the_products(path: str, kept_in: list[str]) -> None:
    test = "src/test/java/shop/PriceTest.java"
    for name, files in _LIBRARY_BASES.items():
        screened = screen_patch([change(path)], PatchPolicy(frozenset({test})), BaseTree(frozenset([*files, test])))
        found = [finding.rule for finding in screened.findings]
        assert found == ([] if name in kept_in else ["jvm_test_library"]), name
