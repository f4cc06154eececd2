"""The task's repository inside a box, as shell scripts: prepared, diffed, patched. Pure functions, text in and text
out.

Why here: the agent's box and the grading box must hold the same base commit, so both are prepared by the same script.
Called by: `activities/workspace.py`, `activities/diff.py` and `activities/grade.py`.

The base commit is kept twice: in the working tree's own `.git` for the agent, and in a root-only copy (`BASE_GIT`) that
the agent cannot reach. Diffs are taken with the copy, so whatever the agent does to its `.git` (commits, amends, hooks,
config, deletion) changes neither what is seen nor what is run. Bytes are bytes: `info/attributes`, which rules over any
file of the tree, switches off line ends, filters and encodings. """

import base64
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath

GIT_STATE = "/run/ratchet"
BASE_GIT = f"{GIT_STATE}/base.git"
ORIGINAL_GIT = f"{GIT_STATE}/original.git"
ARCHIVE = f"{GIT_STATE}/repository.tar.gz"
PATCH, TEST_PATCH, TEST_ARCHIVE = f"{GIT_STATE}/patch", f"{GIT_STATE}/test_patch", f"{GIT_STATE}/tests.tar.gz"
STATEMENT = "PROBLEM_STATEMENT.md"
DOES_NOT_APPLY, TESTS_DO_NOT_APPLY = 3, 5

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
"""Agents and tests run as this user, and few images have it. By hand, because every distribution has another tool for
it."""


def _git_with_base(workdir: str) -> str:
    return f"git {_SETTINGS} --git-dir={BASE_GIT} --work-tree={shlex.quote(workdir)}"


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _word(text: str) -> str:
    """`text` (but for line ends at its end) as one word of the shell: quoted, which starts no program, unless
    apostrophes make that long: a script is one argument of at most 128 KiB. """
    return min(shlex.quote(text), f'"$(printf %s {_encoded(text)} | base64 -d)"', key=len)


def prepare_script(
    workdir: str, pre_commands: list[str], statement: str | None, *, archive: bool = False, keep_history: bool = False
) -> str:
    """Unpacks the row's archive if it has one, runs `pre_commands` in order, makes one base commit of what is there,
    prints its id.

    `statement` is written beside the sources for the agent (None in a grading box) and is never part of a diff.
    `keep_history`: a grading box keeps the repository's own history where only root can read it; in an agent's box it
    is gone. """
    directory = shlex.quote(workdir)
    lines = ["set -e", _ENVIRONMENT, ENSURE_AGENT_USER, f"mkdir -p {directory} {GIT_STATE}", f"chmod 700 {GIT_STATE}"]
    if archive:
        lines.append(f"tar -xzf {ARCHIVE} -C {directory} --no-same-owner && rm -f {ARCHIVE}")
    lines.append(f"cd {directory}")
    for number, command in enumerate(pre_commands):
        lines.append(
            f"bash -c {_word(command)} >&2 </dev/null || {{ code=$?; echo 'pre_command {number} failed' >&2; exit $code; }}"
        )
    original = f"rm -rf {ORIGINAL_GIT}; if [ -d .git ] && [ ! -L .git ]; then mv .git {ORIGINAL_GIT}; fi; rm -rf .git"
    lines += [
        f"cd {directory}",
        # What the repository tracks although it ignores it stays tracked; what else it ignores stays out.
        "tracked=$(mktemp)",
        f"if [ -e .git ]; then git {_SETTINGS} ls-files -z > $tracked 2>/dev/null || : > $tracked; fi",
        original if keep_history else "rm -rf .git",
        # Submodules bring repositories of their own: their files are the task's, their history is nobody's business.
        "find . -mindepth 2 -name .git -prune -exec rm -rf {} +",
        # Before the commit, so that its index knows the files as they stay.
        f"chown -R -h agent: {directory}",
        f"git {_SETTINGS} init -q --template= -b main",
        "mkdir -p .git/info",
        f"echo /{STATEMENT} > .git/info/exclude",
        f"echo '{_ATTRIBUTES}' > .git/info/attributes",
        f"if [ -s $tracked ]; then git {_SETTINGS} add -f --ignore-errors --pathspec-from-file=$tracked --pathspec-file-nul 2>/dev/null || true; fi",
        "rm -f $tracked",
        f"git {_SETTINGS} add -A",
        f"git {_SETTINGS} commit -q --no-verify --allow-empty -m base",
        f"rm -rf {BASE_GIT}",
        f"cp -r .git {BASE_GIT}",
        f"git {_SETTINGS} config core.logAllRefUpdates false",
    ]
    if statement is not None:
        # For whoever looks at the repository from another user: git refuses to work in it otherwise.
        lines.append(f"git config --file /etc/gitconfig --add safe.directory {directory} 2>/dev/null || true")
        lines.append(f"printf %s {_encoded(statement)} | base64 -d > {STATEMENT}; chown agent: {STATEMENT}")
    lines += ["chown -R -h agent: .git", f"git --git-dir={BASE_GIT} rev-parse HEAD"]
    return "\n".join(lines)


def diff_script(workdir: str, max_bytes: int) -> str:
    """Prints two lines: number of changed files, then the binary-safe diff in base64; `too_large <bytes>` instead of
    the second where the diff is larger than `max_bytes`.

    The index is that of the base commit, so staged, committed, new, deleted, binary and mode changes all come from the
    files themselves; ignored files stay out. Repositories that the agent made inside count as the files in them. Every
    try has files of its own ($$): one whose worker died still runs in the box, and its lock on the index must not be in
    the way. """
    git, directory = _git_with_base(workdir), shlex.quote(workdir)
    patch = f"{PATCH}.$$"
    return "\n".join(
        [
            "set -e",
            _ENVIRONMENT,
            # A working tree that the agent removed altogether, or put a link in the place of, is a diff that deletes
            # everything.
            f"if [ -L {directory} ] || [ ! -d {directory} ]; then rm -rf {directory}; mkdir -p {directory}; fi",
            f"cd {directory}",
            "find . -mindepth 1 -name .git -prune -exec rm -rf {} +",
            f"cp -p {BASE_GIT}/index {GIT_STATE}/index.$$",  # with its time, by which git knows which entries to distrust
            f"export GIT_INDEX_FILE={GIT_STATE}/index.$$",
            f"{git} add -A",
            f"{git} diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ HEAD > {patch}",
            f"{git} diff --cached --name-only -z --no-renames HEAD | tr -cd '\\0' | wc -c",
            f"size=$(wc -c < {patch})",
            f'if [ "$size" -gt {max_bytes} ]; then echo "too_large $size"; else base64 -w0 {patch}; echo; fi',
        ]
    )


def apply_script(
    workdir: str, *, patch: bool, test_patch: bool, test_archive: bool, test_commands: Iterable[str]
) -> str:
    """Puts the patch and then the task's tests into a box that holds the base commit.

    Exits with DOES_NOT_APPLY, or with TESTS_DO_NOT_APPLY where the task's own tests are at fault.
    """
    git, directory = _git_with_base(workdir), shlex.quote(workdir)
    lines = ["set -e", _ENVIRONMENT, f"cd {directory}"]
    if patch:
        # Through the index: a file in the place of a directory, and links, come out right.
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
            f"GIT_DIR={ORIGINAL_GIT} GIT_WORK_TREE={directory} GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
            f" bash -c {_word(command)} >&2 </dev/null || exit {TESTS_DO_NOT_APPLY}"
        )
    lines.append("find . -path ./.git -prune -o -not -user agent -exec chown -h agent: {} +")
    return "\n".join(lines)


def protect_script(workdir: str, test_files: Iterable[str]) -> str:
    """The task's tests belong to root: what runs in the box can add files beside them, and can neither change nor move
    them."""
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
    """Prints the base's Python files, one a line."""
    return (
        f"{_git_with_base(workdir)} ls-tree -r --name-only -z HEAD | tr '\\0' '\\n' | grep -E '\\.(py|so|pyd)$' || true"
    )


def both_versions_script(workdir: str, paths: Iterable[str]) -> str:
    """For each path two lines in base64, `-` for a file that is not there: as the base has it, and as it is now."""
    git = _git_with_base(workdir)
    lines = [f"cd {shlex.quote(workdir)}"]
    for path in paths:
        quoted = shlex.quote(path)
        lines.append(
            f"if {git} cat-file -e HEAD:{quoted} 2>/dev/null; then {git} show HEAD:{quoted} | base64 -w0; else printf -- -; fi; echo"
        )
        lines.append(f"if [ -f {quoted} ] && [ ! -L {quoted} ]; then base64 -w0 < {quoted}; else printf -- -; fi; echo")
    return "\n".join(lines)


def restore_script(workdir: str, paths: Iterable[str]) -> str:
    """These files as the base has them; a file that it does not have goes."""
    git = _git_with_base(workdir)
    lines = [
        "set -e",
        f"cd {shlex.quote(workdir)}",
        f"{git} read-tree HEAD",
    ]  # the work is done: its index may be the base's again
    for path in paths:
        quoted = shlex.quote(path)
        lines.append(
            f"rm -rf {quoted}; if {git} cat-file -e HEAD:{quoted} 2>/dev/null; then {git} checkout-index -f -- {quoted}; chown agent: {quoted}; fi"
        )
    return "\n".join(lines)
