"""Shell scripts for the task's repository in a box: prepare it, take a diff, apply a patch. Pure functions.

The agent's box and the grading box must hold the same base commit, so the same script prepares both. The base commit is
kept twice: in the working tree's own `.git` for the agent, and in a root-only copy (`BASE_GIT`) that the agent cannot
reach. Diffs are taken with the copy, so that changes of the agent to its `.git` (commits, hooks, config, deletion)
affect neither the diff nor what is run. `info/attributes`, which overrides any file of the tree, switches off line-end
conversion, filters and encodings, so that bytes stay unchanged.
"""

import base64
import re
import shlex
from collections.abc import Iterable
from importlib.resources import files

GIT_STATE = "/run/ratchet"
BASE_GIT = f"{GIT_STATE}/base.git"
ORIGINAL_GIT = f"{GIT_STATE}/original.git"
ORIGINAL_WORK_TREE = f"{GIT_STATE}/original_work_tree"
"""File with the root of the original repository's working tree, which in a monorepo is above the workdir."""
REAL_WORKDIR = f"{GIT_STATE}/workdir"
"""File with the workdir's path without links, so that an image may name it by a link and an agent not replace it."""
ARCHIVE = f"{GIT_STATE}/repository.tar.gz"
PATCH = f"{GIT_STATE}/patch"
TEST_PATCH = f"{GIT_STATE}/test_patch"
TEST_ARCHIVE = f"{GIT_STATE}/tests.tar.gz"
PATHS = f"{GIT_STATE}/paths"
"""List of paths for a script, uploaded as a file: names may be any bytes, and a list may be longer than an argument."""
MERGED = f"{GIT_STATE}/merged"
"""Directory of the contents that `write_script` writes, named by their number in the list."""
_OUTPUTS = (
    "*.o", "*.obj", "*.lo", "*.a", "*.la", "*.lib", "*.so", "*.dylib", "*.dll", "*.exe", "*.pyd", "*.node", "*.class",
    "*.rlib", "*.rmeta", "*.gch", "*.pch", "*.pcm", "*.ko", "*.bc", "*.hi", "*.cmo", "*.cmx", "*.beam",
)  # fmt: skip
"""Names that compilers and linkers give to what they make."""
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


PRE_COMMAND_BEGINS = re.compile(r"^pre_command (\d+) begins$", re.MULTILINE)
"""The line that the script of `prepare_script` prints before each pre_command, with its number, from 0."""

FAILED_PRE_COMMAND = re.compile(r"pre_command (\d+) failed\s*\Z")
"""The end of what the script of `prepare_script` prints if a pre_command fails: its number, from 0."""


def prepare_script(
    workdir: str,
    pre_commands: list[str],
    statement: str | None,
    *,
    archive: bool = False,
    keep_history: bool = False,
    user: str = "agent",
) -> str:
    """Return a script that unpacks the row's archive, runs `pre_commands`, makes one base commit and prints its id.

    `statement` is written beside the sources for the agent (None in a grading box) and is never part of a diff.
    `keep_history`: keep the repository's own history where only root can read it, for a grading box; otherwise it is
    deleted. Further copies of it in the box are made unreadable for other users than root. `user` gets the files.
    """
    directory = shlex.quote(workdir)
    lines = ["set -e", _ENVIRONMENT, ENSURE_AGENT_USER, f"mkdir -p {directory} {GIT_STATE}", f"chmod 700 {GIT_STATE}"]
    if archive:
        lines.append(f"tar -xzf {ARCHIVE} -C {directory} --no-same-owner && rm -f {ARCHIVE}")
    lines.append(f"cd {directory}")
    for number, command in enumerate(pre_commands):
        lines.append(
            f"echo 'pre_command {number} begins' >&2; bash -c {_word(command)} >&2 </dev/null"
            f" || {{ code=$?; echo 'pre_command {number} failed' >&2; exit $code; }}"
        )
    lines += [
        f"cd {directory}",
        f"pwd -P > {REAL_WORKDIR}",
        f"git -c safe.directory='*' rev-parse --show-toplevel > {ORIGINAL_WORK_TREE} 2>/dev/null"
        f" || pwd -P > {ORIGINAL_WORK_TREE}",
        # Files that the repository tracks although it ignores them stay tracked; other ignored files are left out.
        "tracked=$(mktemp)",
        f"git {_SETTINGS} ls-files -z > $tracked 2>/dev/null || : > $tracked",
        *_hide_history(directory, keep_history),
        # Submodules are repositories of their own: keep their files, drop their history.
        "find . -mindepth 2 -name .git -prune -exec rm -rf {} +",
        # Before the commit, so that the index records the final owner.
        f"chown -R -h {user}: .",
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
        lines.append(f"printf %s {_encoded(statement)} | base64 -d > {STATEMENT}; chown {user}: {STATEMENT}")
    lines += [f"chown -R -h {user}: .git", f"git --git-dir={BASE_GIT} rev-parse HEAD"]
    return "\n".join(lines)


def _hide_history(directory: str, keep_history: bool) -> list[str]:
    """Return lines that take away every git directory that the workdir uses, and keep it at ORIGINAL_GIT if wanted."""
    script = (files("grading") / "box" / "hide_history.sh").read_text()
    original = ORIGINAL_GIT if keep_history else "''"
    return [f"(workdir={directory} original={original} hidden={GIT_STATE}/history\n{script})", "rm -rf .git"]


_MAX_RATIO, _HEADER_BYTES, _ROOM_FACTOR = 1100, 60, 4
"""The most by which git's compression makes a file smaller, and the least that a diff says of a file beside it. A diff
needs room for its index, objects and patch, estimated by this factor of its largest size."""


def diff_script(workdir: str, max_bytes: int) -> str:
    """Return a script that prints two lines: the number of changed files with size and SHA-256 of the diff, and the
    binary-safe diff in base64.

    The second line is `too_large` if the diff is larger than `max_bytes`; if what was added to the tree shows that, no
    file is read, so that a filled disk takes no time, and its least size is printed. The diff is taken from the files
    with the base commit's index, so it contains staged, committed, new, deleted, binary and mode changes; ignored files
    are left out, and repositories that the agent made count as their files. Every try has a directory of its own,
    because the script of a try whose worker died may still run and hold the lock of the index. It is in memory if that
    has more room than a disk that is short of it, and in the other place if one fails.
    """
    git = _git_with_base(workdir)
    directory = shlex.quote(workdir)
    patch = "$own/patch"
    sizes = "xargs -0 -r stat -c %s -- 2>/dev/null"
    return "\n".join(
        [
            "set -e",
            _ENVIRONMENT,
            # If the agent removed the working tree or replaced it by a link, the diff deletes every file.
            # Not by `realpath`, which images may lack.
            f"real=$(cat {REAL_WORKDIR})",
            f'if [ "$(cd {directory} 2>/dev/null && pwd -P)" != "$real" ]; then'
            f" rm -rf {directory}; mkdir -p {directory}; fi",
            f"cd {directory}",
            "find . -mindepth 1 -name .git -prune -exec rm -rf {} +",
            "count=0 size=0 grown=0",
            f"while read -r one; do count=$((count + 1)) size=$((size + one / {_MAX_RATIO} + {_HEADER_BYTES})); done"
            f" < <({git} ls-files -z -o --exclude-standard | {sizes})",
            # A file of the commit may have a small diff however large it is; its growth is in any diff.
            f"while read -r one; do grown=$((grown + one)); done < <({git} diff-files --name-only -z | {sizes})",
            "while read -r one; do grown=$((grown - one)); done"
            f" < <({git} diff-files --raw -z | while read -r -d '' _ _ old _ && read -r -d '' _; do echo $old; done"
            f" | {git} cat-file --batch-check='%(objectsize)' | grep -v ' ')",
            f'[ "$grown" -lt 0 ] || size=$((size + grown / {_MAX_RATIO}))',
            f'if [ "$size" -gt {max_bytes} ]; then digest=$(sha256sum </dev/null);'
            ' echo "$count $size ${digest%% *}"; echo too_large; exit 0; fi',
            # All of the memory counts, because it is emptied.
            f"free=$(stat -f -c '%a * %S' {GIT_STATE} || true) memory=$(stat -f -c '%b * %S' /dev/shm || true)",
            f"if [ $((free)) -le {_ROOM_FACTOR * max_bytes} ] && [ $((memory)) -gt $((free)) ]; then"
            f" places='/dev/shm {GIT_STATE}'; else places='{GIT_STATE} /dev/shm'; fi",
            "for place in $places; do [ $place != /dev/shm ] || find /dev/shm -mindepth 1 -delete || true",
            # With its time, by which git decides which entries it has to compare by content.
            f"own=$(mktemp -d $place/diff.XXXXXX) && cp -p {BASE_GIT}/index $own/index && mkdir $own/objects"
            " && export GIT_INDEX_FILE=$own/index GIT_OBJECT_DIRECTORY=$own/objects"
            f" GIT_ALTERNATE_OBJECT_DIRECTORIES={BASE_GIT}/objects && {git} add -A"
            f" && {git} diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames"
            f" --src-prefix=a/ --dst-prefix=b/ HEAD > {patch} && break",
            'rm -rf "$own"; own=; done; [ -n "$own" ]',
            "set -o pipefail",
            f"count=$({git} diff --cached --name-only -z --no-renames HEAD | tr -cd '\\0' | wc -c)",
            f"size=$(wc -c < {patch})",
            f"digest=$(sha256sum < {patch})",
            'echo "$((count)) $((size)) ${digest%% *}"',
            f'if [ "$size" -gt {max_bytes} ]; then echo too_large; else base64 -w0 {patch}; echo; fi',
        ]
    )


# A build takes a target that is newer than its sources as made already. What a patch adds beside text (binaries, empty
# stamps, programs, links) is therefore older than all sources; a text may be a source that has to be built, unless it
# has the name of an output: a linker reads a text as a script, which may name other files.
_AGE_OUTPUTS = """\
{git} diff --name-only --diff-filter=A -z HEAD $tree | while IFS= read -r -d '' path; do
    made=; case "$path" in {names}) made=1 ;; esac
    if [ -n "$made" ] || [ -L "./$path" ] || [ -x "./$path" ] || ! grep -Iq '' "./$path"; then
        touch -h -d 2000-01-01 "./$path"
    fi
done"""


def apply_script(
    workdir: str,
    *,
    patch: bool,
    test_patch: bool,
    test_archive: bool,
    test_commands: Iterable[str],
    user: str = "agent",
) -> str:
    """Return a script that applies the patch and then the task's tests to the base commit. `user` gets the files.

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
            _AGE_OUTPUTS.format(git=git, names="|".join(_OUTPUTS)),
        ]
    if test_patch:
        lines.append(f"{git} apply --binary --whitespace=nowarn {TEST_PATCH} || exit {TESTS_DO_NOT_APPLY}")
    if test_archive:
        lines.append(
            f"tar -xzf {TEST_ARCHIVE} -C {directory} --no-same-owner --unlink-first || exit {TESTS_DO_NOT_APPLY}"
        )
    for command in test_commands:
        lines.append(
            f'GIT_DIR={ORIGINAL_GIT} GIT_WORK_TREE="$(cat {ORIGINAL_WORK_TREE})"'
            f" GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
            f" bash -c {_word(command)} >&2 </dev/null || exit {TESTS_DO_NOT_APPLY}"
        )
    lines.append(f"find . -path ./.git -prune -o -not -user {user} -exec chown -h {user}: {{}} +")
    return "\n".join(lines)


def path_list(paths: Iterable[str]) -> bytes:
    """Return the content of PATHS: each path from the repository's root, ended by NUL."""
    return b"".join(b"./" + path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def _for_each(body: str) -> str:
    """Return a loop over PATHS. `$path` begins with `./`, so that no name reads as an option."""
    return f"while IFS= read -r -d '' path; do\n{body}\ndone < {PATHS}"


def protect_script(workdir: str) -> str:
    """Return a script that gives the tests of PATHS to root: the box can add files beside them, not change them."""
    body = """
  directory=${path%/*}
  if [ "$directory" != . ] && [ -d "$directory" ] && [ ! -L "$directory" ] && [ -z "${own[$directory]-}" ]; then
    own[$directory]=1
    chown -R -h root: "$directory" && find "$directory" -type d -exec chmod 1777 {} +
  fi
  [ -f "$path" ] && [ ! -L "$path" ] && chown -h root: "$path" && chmod a+r,go-w "$path"
  while [ -z "${above[$directory]-}" ]; do
    above[$directory]=1
    [ -d "$directory" ] && [ ! -L "$directory" ] && chown root: "$directory" && chmod 1777 "$directory"
    [ "$directory" = . ] || directory=${directory%/*}
  done"""
    return "\n".join([f"cd {shlex.quote(workdir)} || exit 1", "declare -A own above", _for_each(body), "true"])


_IMPORT_LINES = r"(^|[^[:alnum:]_])(import|from|require|require_relative|include|load|source|use|mod)[^[:alnum:]_]"
_MAX_IMPORT_BYTES = 4_000_000


def base_file_script(workdir: str, path: str) -> str:
    """Return a script that prints a file of the base commit, nothing if it has no such file."""
    return f"cd {shlex.quote(workdir)} && {_git_with_base(workdir)} show {shlex.quote(f'HEAD:./{path}')}"


def base_tree_script(workdir: str) -> str:
    """Return a script that prints in base64: all paths of the base commit, and import lines of its tests."""
    git = _git_with_base(workdir)
    tests = " ".join(f"':(icase)*{word}*'" for word in ("test", "spec"))
    return "\n".join(
        [
            f"cd {shlex.quote(workdir)} || exit 1",
            f"{git} ls-tree -r --name-only -z HEAD | base64 -w0; echo",
            f"{git} grep -hIE {shlex.quote(_IMPORT_LINES)} HEAD -- {tests} | head -c {_MAX_IMPORT_BYTES} | base64 -w0",
            "echo",
        ]
    )


def both_versions_script(workdir: str, max_bytes: int) -> str:
    """Return a script that prints two lines per path of PATHS: the base's content in base64 and the present one, `-` if
    missing. A file of more than `max_bytes` is cut after one byte more."""
    git = _git_with_base(workdir)
    limit = f"head -c {max_bytes + 1} | base64 -w0"
    body = f"""
  if {git} cat-file -e "HEAD:${{path#./}}" 2>/dev/null; then {git} cat-file blob "HEAD:${{path#./}}" | {limit}
  else printf -- -; fi; echo
  if [ -f "$path" ] && [ ! -L "$path" ]; then cat < "$path" | {limit}; else printf -- -; fi; echo"""
    return "\n".join([f"cd {shlex.quote(workdir)} || exit 1", _for_each(body)])


def write_script(workdir: str) -> str:
    """Return a script that writes the contents of MERGED into the files of PATHS."""
    body = f"""  cat {MERGED}/$number > "$path"; number=$((number + 1))"""
    return "\n".join(["set -e", f"cd {shlex.quote(workdir)}", "number=0", _for_each(body)])


def restore_script(workdir: str, user: str) -> str:
    """Return a script that restores the files of PATHS, for `user`, from the base commit; it removes further ones."""
    git = _git_with_base(workdir)
    body = f"""
  rm -rf -- "$path"
  if {git} cat-file -e "HEAD:${{path#./}}" 2>/dev/null; then
    {git} checkout-index -f -- "${{path#./}}"; chown -h {user}: "$path"
  fi"""
    return "\n".join(["set -e", f"cd {shlex.quote(workdir)}", f"{git} read-tree HEAD", _for_each(body)])


def reset_script(workdir: str, user: str) -> str:
    """Return a script that takes a patch, and what was put in after it, out of the working tree again."""
    git = _git_with_base(workdir)
    return "\n".join(
        [
            "set -e",
            _ENVIRONMENT,
            f"cd {shlex.quote(workdir)}",
            f"rm -rf {MERGED} {PATCH} {BASE_GIT}/index.lock",
            # First, because the patch may have filled the disk.
            f"{git} ls-files -z | xargs -0 -r rm -rf --",
            f"{git} read-tree --reset -u HEAD",
            f"{git} checkout-index -f -a",
            f"{git} clean -fdq -e /.git",
            f"chown -R -h {user}: .",
        ]
    )
