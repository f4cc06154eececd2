"""Shell scripts for the task's repository in a box: prepare it, take a diff, apply a patch. Pure functions.

The agent's box and the grading box must hold the same base commit, so the same script prepares both. The base commit is
kept twice: in the working tree's own `.git` for the agent, and in a root-only copy (`BASE_GIT`) that the agent cannot
reach. Diffs are taken with the copy, so that changes of the agent to its `.git` (commits, hooks, config, deletion)
affect neither the diff nor what is run. `info/attributes`, which overrides any file of the tree, switches off line-end
conversion, filters and encodings, so that bytes stay unchanged.
"""

import base64
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath

GIT_STATE = "/run/ratchet"
BASE_GIT = f"{GIT_STATE}/base.git"
ORIGINAL_GIT = f"{GIT_STATE}/original.git"
ARCHIVE = f"{GIT_STATE}/repository.tar.gz"
PATCH = f"{GIT_STATE}/patch"
TEST_PATCH = f"{GIT_STATE}/test_patch"
TEST_ARCHIVE = f"{GIT_STATE}/tests.tar.gz"
STATEMENT = "PROBLEM_STATEMENT.md"
DOES_NOT_APPLY = 3
TESTS_DO_NOT_APPLY = 5

# Fixed identity and date: equal trees give equal commit ids in every box.
_ENVIRONMENT = """
export GIT_AUTHOR_NAME=ratchet GIT_AUTHOR_EMAIL=ratchet@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=ratchet GIT_COMMITTER_EMAIL=ratchet@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TERMINAL_PROMPT=0 LC_ALL=C.UTF-8
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ATTR_SOURCE
"""

_SETTINGS = (
    "-c core.autocrlf=false -c core.fileMode=true -c core.symlinks=true -c core.logAllRefUpdates=false"
    " -c gc.auto=0 -c maintenance.auto=false -c safe.directory='*'"
)
_ATTRIBUTES = "* -text !eol !filter !ident !working-tree-encoding !diff !merge"

ENSURE_AGENT_USER = """
if ! grep -q '^agent:' /etc/passwd; then
  number=1000
  while cat /etc/passwd /etc/group 2>/dev/null | grep -q "^[^:]*:[^:]*:$number:"; do number=$((number + 1)); done
  echo "agent:x:$number:$number:agent:/home/agent:/bin/bash" >> /etc/passwd
  grep -q '^agent:' /etc/group 2>/dev/null || echo "agent:x:$number:" >> /etc/group
  mkdir -p /home/agent && chown agent: /home/agent
fi
"""
"""Agents and tests run as this user, which few images have. Written without useradd, which differs by distribution."""


def _git_with_base(workdir: str) -> str:
    return f"git {_SETTINGS} --git-dir={BASE_GIT} --work-tree={shlex.quote(workdir)}"


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _word(text: str) -> str:
    """Return `text`, without trailing line ends, as one word of the shell.

    Quoted, or in base64 if apostrophes would make quoting longer: a script is one argument of at most 128 KiB.
    """
    return min(shlex.quote(text), f'"$(printf %s {_encoded(text)} | base64 -d)"', key=len)


def prepare_script(
    workdir: str, pre_commands: list[str], statement: str | None, *, archive: bool = False, keep_history: bool = False
) -> str:
    """Return a script that unpacks the row's archive, runs `pre_commands`, makes one base commit and prints its id.

    `statement` is written beside the sources for the agent (None in a grading box) and is never part of a diff.
    `keep_history`: keep the repository's own history where only root can read it, for a grading box; otherwise it is
    deleted.
    """
    directory = shlex.quote(workdir)
    lines = ["set -e", _ENVIRONMENT, ENSURE_AGENT_USER, f"mkdir -p {directory} {GIT_STATE}", f"chmod 700 {GIT_STATE}"]
    if archive:
        lines.append(f"tar -xzf {ARCHIVE} -C {directory} --no-same-owner && rm -f {ARCHIVE}")
    lines.append(f"cd {directory}")
    for number, command in enumerate(pre_commands):
        lines.append(
            f"bash -c {_word(command)} >&2 </dev/null"
            f" || {{ code=$?; echo 'pre_command {number} failed' >&2; exit $code; }}"
        )
    original = f"rm -rf {ORIGINAL_GIT}; if [ -d .git ] && [ ! -L .git ]; then mv .git {ORIGINAL_GIT}; fi; rm -rf .git"
    lines += [
        f"cd {directory}",
        # Files that the repository tracks although it ignores them stay tracked; other ignored files are left out.
        "tracked=$(mktemp)",
        f"if [ -e .git ]; then git {_SETTINGS} ls-files -z > $tracked 2>/dev/null || : > $tracked; fi",
        original if keep_history else "rm -rf .git",
        # Submodules are repositories of their own: keep their files, drop their history.
        "find . -mindepth 2 -name .git -prune -exec rm -rf {} +",
        # Before the commit, so that the index records the final owner.
        f"chown -R -h agent: {directory}",
        f"git {_SETTINGS} init -q --template= -b main",
        "mkdir -p .git/info",
        f"echo /{STATEMENT} > .git/info/exclude",
        f"echo '{_ATTRIBUTES}' > .git/info/attributes",
        f"if [ -s $tracked ]; then git {_SETTINGS} add -f --ignore-errors --pathspec-from-file=$tracked"
        " --pathspec-file-nul 2>/dev/null || true; fi",
        "rm -f $tracked",
        f"git {_SETTINGS} add -A",
        f"git {_SETTINGS} commit -q --no-verify --allow-empty -m base",
        f"rm -rf {BASE_GIT}",
        f"cp -r .git {BASE_GIT}",
        f"git {_SETTINGS} config core.logAllRefUpdates false",
    ]
    if statement is not None:
        # Git refuses to work in a repository of another user unless it is listed here.
        lines.append(f"git config --file /etc/gitconfig --add safe.directory {directory} 2>/dev/null || true")
        lines.append(f"printf %s {_encoded(statement)} | base64 -d > {STATEMENT}; chown agent: {STATEMENT}")
    lines += ["chown -R -h agent: .git", f"git --git-dir={BASE_GIT} rev-parse HEAD"]
    return "\n".join(lines)


def diff_script(workdir: str, max_bytes: int) -> str:
    """Return a script that prints two lines: the number of changed files, and the binary-safe diff in base64.

    The second line is `too_large <bytes>` if the diff is larger than `max_bytes`. The diff is taken from the files with
    the base commit's index, so it contains staged, committed, new, deleted, binary and mode changes; ignored files are
    left out, and repositories that the agent made count as their files. Every try uses files of its own ($$), because
    the script of a try whose worker died may still run and hold the lock of the index.
    """
    git = _git_with_base(workdir)
    directory = shlex.quote(workdir)
    patch = f"{PATCH}.$$"
    return "\n".join(
        [
            "set -e",
            _ENVIRONMENT,
            # If the agent removed the working tree or replaced it by a link, the diff deletes every file.
            f"if [ -L {directory} ] || [ ! -d {directory} ]; then rm -rf {directory}; mkdir -p {directory}; fi",
            f"cd {directory}",
            "find . -mindepth 1 -name .git -prune -exec rm -rf {} +",
            # With its time, by which git decides which entries it has to compare by content.
            f"cp -p {BASE_GIT}/index {GIT_STATE}/index.$$",
            f"export GIT_INDEX_FILE={GIT_STATE}/index.$$",
            f"{git} add -A",
            f"{git} diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames"
            f" --src-prefix=a/ --dst-prefix=b/ HEAD > {patch}",
            f"{git} diff --cached --name-only -z --no-renames HEAD | tr -cd '\\0' | wc -c",
            f"size=$(wc -c < {patch})",
            f'if [ "$size" -gt {max_bytes} ]; then echo "too_large $size"; else base64 -w0 {patch}; echo; fi',
        ]
    )


def apply_script(
    workdir: str, *, patch: bool, test_patch: bool, test_archive: bool, test_commands: Iterable[str]
) -> str:
    """Return a script that applies the patch and then the task's tests to the base commit.

    It exits with DOES_NOT_APPLY, or with TESTS_DO_NOT_APPLY if the task's own tests cannot be applied.
    """
    git = _git_with_base(workdir)
    directory = shlex.quote(workdir)
    lines = ["set -e", _ENVIRONMENT, f"cd {directory}"]
    if patch:
        # Through the index, which handles links, and a file that replaces a directory.
        lines += [
            f"cp {BASE_GIT}/index {GIT_STATE}/index",
            f"{git} apply --cached --binary --whitespace=nowarn {PATCH} || exit {DOES_NOT_APPLY}",
            f"tree=$({git} write-tree)",
            f"cp {GIT_STATE}/index {BASE_GIT}/index",
            f"{git} update-index -q --refresh || true",
            f"{git} read-tree -m -u HEAD $tree || exit {DOES_NOT_APPLY}",
        ]
    if test_patch:
        lines.append(f"{git} apply --binary --whitespace=nowarn {TEST_PATCH} || exit {TESTS_DO_NOT_APPLY}")
    if test_archive:
        lines.append(
            f"tar -xzf {TEST_ARCHIVE} -C {directory} --no-same-owner --unlink-first || exit {TESTS_DO_NOT_APPLY}"
        )
    for command in test_commands:
        lines.append(
            f"GIT_DIR={ORIGINAL_GIT} GIT_WORK_TREE={directory}"
            f" GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
            f" bash -c {_word(command)} >&2 </dev/null || exit {TESTS_DO_NOT_APPLY}"
        )
    lines.append("find . -path ./.git -prune -o -not -user agent -exec chown -h agent: {} +")
    return "\n".join(lines)


def protect_script(workdir: str, test_files: Iterable[str]) -> str:
    """Return a script that gives the task's tests to root: code in the box can add files beside them, but not change or
    move them.
    """
    files = sorted(f"./{path}" for path in test_files)
    own = dict.fromkeys(str(PurePosixPath(path).parent) for path in files)
    above = sorted({str(parent) for path in files for parent in PurePosixPath(path).parents})
    lines = [f"cd {shlex.quote(workdir)}"]
    lines += [
        f"[ -d {directory} ] && chown -R -h root: {directory} && find {directory} -type d -exec chmod 1777 {{}} +"
        for directory in (shlex.quote(f"./{name}") for name in own if name != ".")
    ]
    lines += [f"[ -f {path} ] && chown -h root: {path} && chmod a+r,go-w {path}" for path in map(shlex.quote, files)]
    lines += [
        f"[ -d {directory} ] && chown root: {directory} && chmod 1777 {directory}"
        for directory in (shlex.quote(name) for name in above)
    ]
    return "\n".join([*lines, "true"])


def python_files_script(workdir: str) -> str:
    """Return a script that prints the Python files of the base commit, one per line."""
    return (
        f"{_git_with_base(workdir)} ls-tree -r --name-only -z HEAD | tr '\\0' '\\n' | grep -E '\\.(py|so|pyd)$' || true"
    )


def both_versions_script(workdir: str, paths: Iterable[str]) -> str:
    """Return a script that prints two lines per path: the base's content in base64 and the present one, `-` if
    missing."""
    git = _git_with_base(workdir)
    lines = [f"cd {shlex.quote(workdir)}"]
    for path in paths:
        quoted = shlex.quote(path)
        lines.append(
            f"if {git} cat-file -e HEAD:{quoted} 2>/dev/null; then {git} show HEAD:{quoted} | base64 -w0;"
            " else printf -- -; fi; echo"
        )
        lines.append(f"if [ -f {quoted} ] && [ ! -L {quoted} ]; then base64 -w0 < {quoted}; else printf -- -; fi; echo")
    return "\n".join(lines)


def restore_script(workdir: str, paths: Iterable[str]) -> str:
    """Return a script that restores these files from the base commit; files that it does not have are removed."""
    git = _git_with_base(workdir)
    lines = [
        "set -e",
        f"cd {shlex.quote(workdir)}",
        f"{git} read-tree HEAD",
    ]
    for path in paths:
        quoted = shlex.quote(path)
        lines.append(
            f"rm -rf {quoted}; if {git} cat-file -e HEAD:{quoted} 2>/dev/null;"
            f" then {git} checkout-index -f -- {quoted}; chown agent: {quoted}; fi"
        )
    return "\n".join(lines)
