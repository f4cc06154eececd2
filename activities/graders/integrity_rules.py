"""The integrity rules as a table: which files of a patch could change the test runner, by ecosystem.

`patch_screening.py` applies the table, `ratchet tasks rules` prints it, and a verdict names the rule. A task may add
patterns of its own (`metadata.integrity`).
"""

import sys
from dataclasses import dataclass
from typing import Literal

Kind = Literal["any", "added", "symlink", "shadow", "content", "test"]


@dataclass(slots=True, frozen=True)
class Rule:
    """One rule. `patterns`: as in .gitignore, matched against the path from the repository's root.

    `kind` narrows the match: `added` only new files, `symlink` only links, `content` only files whose added text
    matches `content`. `sections`: kind of settings file of which only the runner's part is restored
    (`runner_settings.py`); None: the whole change is left out.
    """

    name: str
    ecosystem: str
    patterns: tuple[str, ...]
    why: str
    kind: Kind = "any"
    sections: str | None = None
    content: str = ""


RULES: tuple[Rule, ...] = (
    Rule("listed_test", "any", (), "tests of the task are restored from the task", kind="test"),
    Rule(
        "git_dir", "git", (".git", "**/.git", "**/.git/**"), "hooks, config and attributes of a repository run programs"
    ),
    Rule(
        "git_hooks",
        "git",
        (".githooks/**", ".husky/**", "hooks/pre-*", "hooks/post-*"),
        "hooks run at the next git command",
    ),
    Rule(
        "git_filters",
        "git",
        ("**/.gitattributes", "**/.lfsconfig"),
        "filters run programs at checkout",
        kind="content",
        content=r"\b(?:filter|diff|merge)=|\[lfs\]",
    ),
    Rule(
        "path_shim",
        "shell",
        tuple(
            f"**/{name}"
            for name in (
                "python",
                "python3",
                "pytest",
                "py.test",
                "tox",
                "nox",
                "node",
                "npm",
                "npx",
                "yarn",
                "pnpm",
                "go",
                "cargo",
                "java",
                "mvn",
                "bash",
                "sh",
                "env",
                "git",
                "make",
            )
        ),
        "a program of that name could be started in place of the real one",
        kind="added",
    ),
    Rule(
        "shell_startup",
        "shell",
        ("**/.bashrc", "**/.bash_profile", "**/.profile", "**/.envrc", "**/.env"),
        "read by shells and runners",
    ),
    Rule("conftest", "python", ("**/conftest.py",), "pytest runs it before the tests"),
    Rule(
        "startup_module",
        "python",
        ("**/sitecustomize.py", "**/usercustomize.py", "**/sitecustomize/**", "**/usercustomize/**"),
        "the interpreter runs it at every start",
    ),
    Rule("path_file", "python", ("**/*.pth", "**/*._pth", "**/pyvenv.cfg"), "the interpreter reads it at every start"),
    Rule(
        "bytecode", "python", ("**/*.pyc", "**/*.pyo", "**/__pycache__/**"), "bytecode may stand in for a source file"
    ),
    Rule(
        "plugin_metadata",
        "python",
        ("**/*.egg-info/**", "**/*.dist-info/**", "**/entry_points.txt", "**/*.egg-link"),
        "entry points load plugins into the runner",
    ),
    Rule(
        "runner_config",
        "python",
        ("**/pytest.ini", "**/.pytest.ini", "**/pytest.toml", "**/.pytest.toml", "**/.coveragerc", "**/noxfile.py"),
        "configures the runner",
    ),
    Rule(
        "runner_sections",
        "python",
        ("**/pyproject.toml", "**/setup.cfg", "**/tox.ini"),
        "its runner sections configure the runner",
        sections="config",
    ),
    Rule(
        "shadow_module",
        "python",
        ("**/*.py", "**/*.so", "**/*.pyd"),
        "would be imported in place of the standard library or the runner",
        kind="shadow",
    ),
    Rule(
        "package_scripts",
        "javascript",
        ("**/package.json",),
        "its test scripts and runner keys decide what runs",
        sections="package_json",
    ),
    Rule(
        "js_runner_config",
        "javascript",
        (
            "**/jest.config.*",
            "**/jest.setup.*",
            "**/vitest.config.*",
            "**/vite.config.*",
            "**/.mocharc*",
            "**/karma.conf.*",
            "**/ava.config.*",
            "**/babel.config.*",
            "**/.babelrc*",
            "**/.nycrc*",
            "**/playwright.config.*",
            "**/cypress.config.*",
        ),
        "configures the runner",
    ),
    Rule(
        "js_packages",
        "javascript",
        ("**/node_modules/**", "**/.npmrc", "**/.yarnrc*", "**/.pnp.*", "**/.pnpmfile.*"),
        "replaces packages of the runner",
    ),
    Rule(
        "make_targets",
        "make",
        ("**/Makefile", "**/makefile", "**/GNUmakefile"),
        "its test targets decide what runs",
        sections="makefile",
    ),
    Rule(
        "test_main",
        "go",
        ("**/*_test.go",),
        "TestMain decides whether tests run",
        kind="content",
        content=r"func\s+TestMain\s*\(",
    ),
    Rule("cargo_runner", "rust", ("**/.cargo/**", "**/rust-toolchain*"), "a runner of one's own"),
    Rule(
        "jvm_runner",
        "java",
        ("**/junit-platform.properties", "**/.mvn/**", "**/gradle/init.d/**"),
        "configures the runner",
    ),
    Rule("ruby_runner", "ruby", ("**/.rspec", "**/spec_helper.rb", "**/.bundle/**"), "loaded before the tests"),
)

TAMPERED = "runner_tampered"
"""The rule of a changed runner: a test that must fail was reported as passed. It concerns no file."""

CONTROL_RUN = "control_run"
"""The rule of a control run: a test passed that a correct solution fails. It concerns no file."""

SHADOWED_MODULES = frozenset(sys.stdlib_module_names) | {
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "xdist",
    "pytest_cov",
    "coverage",
    "nose",
    "hypothesis",
    "ratchet_witness",
}


def rules_table() -> list[dict[str, str]]:
    """Return the rules as rows of a report."""
    return [
        {
            "rule": rule.name,
            "ecosystem": rule.ecosystem,
            "files": ", ".join(rule.patterns) or "the task's own tests",
            "what happens": "left out" if rule.sections is None else "the runner's part is put back",
            "why": rule.why,
        }
        for rule in RULES
    ]
