"""A patch contains the agent's changes for any use of git, and applies in a fresh box."""

import base64
import hashlib
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.diff import capture_diff, parse_diff
from grading import git_scripts
from grading.diff_sections import join_diff, split_diff
from sandboxes.base import Sandbox
from tests.integration.sandbox_gateway.conftest import GatewayProcess, provider_of

pytestmark = pytest.mark.timeout(1800)
WORKDIR = "/workspace/a repo"
GIT = "git -c user.name=a -c user.email=a@a"
MAX_BYTES = 2_000_000
PRE = [
    f"{GIT} init -q . && mkdir -p src 'd ir' && echo one > a.txt && echo two > src/b.py && echo x > 'd ir/ü.txt'"
    " && printf 'crlf\\r\\n' > win.txt && echo '*.txt text eol=lf' > .gitattributes && printf '\\000\\001' > bin"
    " && ln -s a.txt link"
    " && printf 'build/\\n*.log\\n' > .gitignore && mkdir build && echo kept > build/kept"
    f" && git add -A && git add -f build/kept && {GIT} commit -qm first && echo two > a.txt && {GIT} commit -qam second"
]
_FIND = "find . -path ./.git -prune -o -mindepth 1 -not -name PROBLEM_STATEMENT.md"
LISTING = (
    f"{{ {_FIND} \\( -type l -printf '%P\\t%l\\n' -o -type f -perm /111 -printf '%P\\tx\\n' \\);"
    f" {_FIND} -type f -exec md5sum {{}} + | sed -E 's,^(\\\\?[0-9a-f]+)  \\./(.*)$,\\2\\t\\1,'; }} | LC_ALL=C sort"
)
"""One line for each link, executable file and file's contents."""


async def prepare(box: Sandbox, role: str, pre: list[str] = PRE, workdir: str = WORKDIR) -> str:
    agent = role == "agent"
    script = git_scripts.prepare_script(workdir, pre, "fix it" if agent else None, keep_history=not agent)
    return (await box.exec(script, user="root", timeout=120)).stdout.strip().splitlines()[-1]


async def taken(box: Sandbox, workdir: str = WORKDIR) -> bytes:
    result = await box.exec(git_scripts.diff_script(workdir, MAX_BYTES), user="root", timeout=120)
    return parse_diff(result.stdout, MAX_BYTES).diff


async def put(box: Sandbox, diff: bytes, workdir: str = WORKDIR) -> None:
    await box.write_file(git_scripts.PATCH, diff, user="root")
    script = git_scripts.apply_script(workdir, patch=True, test_patch=False, test_archive=False, test_commands=())
    await box.exec(script, user="root", timeout=120)


async def listing(box: Sandbox, workdir: str = WORKDIR) -> str:
    return (await box.exec(LISTING, user="root", cwd=workdir, timeout=120)).stdout


STATES: dict[str, tuple[str, str]] = {
    "staged": ("echo new > a.txt && git add a.txt", "a.txt"),
    "committed": (f"echo new > a.txt && {GIT} commit -qam mine", "a.txt"),
    "amended": (f"echo new > a.txt && {GIT} commit -q --amend -am mine", "a.txt"),
    "on a new branch": (
        f"git checkout -q -b other && echo new > a.txt && {GIT} commit -qam mine && git checkout -q main",
        "",
    ),
    "on a new branch and left there": (
        f"git checkout -q -b other && echo new > a.txt && {GIT} commit -qam mine",
        "a.txt",
    ),
    "detached": (f"git checkout -q --detach && echo new > a.txt && {GIT} commit -qam mine", "a.txt"),
    "without .git": ("echo new > a.txt && rm -rf .git", "a.txt"),
    "with a broken .git": ("echo new > a.txt && echo nonsense > .git/HEAD && rm -rf .git/objects", "a.txt"),
    "stashed": ("echo new > a.txt && git stash -q", ""),
    "a nested repository": (
        f"mkdir n && cd n && git init -q . && echo y > f && git add f && {GIT} commit -qm n",
        "n/f",
    ),
    "a nested repository without a commit": ("mkdir n && cd n && git init -q . && echo y > f", "n/f"),
    "assumed unchanged": ("git update-index --assume-unchanged a.txt && echo new > a.txt", "a.txt"),
    "hidden by info/exclude": ("echo secret > hid && echo hid >> .git/info/exclude", "hid"),
    "with hostile settings": (
        "git config core.hooksPath . && git config diff.external /bin/false && git config core.fsmonitor /bin/false"
        " && git config filter.x.clean 'sed s/.//' && echo '* filter=x -diff' > .gitattributes && echo new > a.txt",
        "a.txt",
    ),
    "an ignored file": ("mkdir -p build && echo out > build/out && echo l > x.log", ""),
    "a tracked file that is ignored": ("echo changed > build/kept", "build/kept"),
    "renamed": ("git mv a.txt c.txt", "c.txt"),
    "a mode": ("chmod +x src/b.py", "src/b.py"),
    "a link's target": ("ln -sf src/b.py link", "link"),
    "a file in place of a link": ("rm link && echo plain > link", "link"),
    "a directory in place of a file": ("rm a.txt && mkdir a.txt && echo in > a.txt/in", "a.txt/in"),
    "a file in place of a directory": ("rm -r src && echo flat > src", "src"),
    "a link in place of a directory": ("mv src real && ln -s real src", "real/b.py"),
    "binary": ("head -c 5000 /dev/urandom > bin", "bin"),
    "line ends": ("printf 'crlf\\r\\nmore\\r\\n' > win.txt && printf 'x\\r\\n' > a.txt", "win.txt"),
    "everything": ("find . -mindepth 1 -maxdepth 1 -not -name .git -exec rm -rf {} +", "a.txt"),
    "strange names": (
        "echo 1 > $'tab\\tnew\\nline' && echo 2 > '\"quoted\"' && echo 3 > -dash && mkdir -p ' ' && echo 4 > ' / '",
        "",
    ),
    "an unreadable file": ("echo 1 > locked && chmod 000 locked && chmod 000 src", "locked"),
    "a fifo and a socket": ("mkfifo pipe; echo new > a.txt", "a.txt"),
    "no newline": ("printf end > a.txt", "a.txt"),
    "an empty file": (": > empty", "empty"),
}


@pytest.mark.parametrize("state", STATES)
async def test_whatever_was_done_to_git(box: Sandbox, second_box: Sandbox, state: str) -> None:
    command, path = STATES[state]
    assert await prepare(box, "agent") == await prepare(second_box, "grade")
    before = await listing(box)
    await box.exec(command, user="agent", cwd=WORKDIR, timeout=60)
    diff = await taken(box)
    changes = split_diff(diff)
    assert join_diff(changes) == diff
    if path:
        assert path in {change.path for change in changes}, (sorted(change.path for change in changes), diff[:2000])
    elif state != "strange names":
        assert not changes, diff[:2000]
    if diff:
        await put(second_box, diff)
    ignored = ("build/out", "x.log")
    wanted = [line for line in (await listing(box)).splitlines() if not line.startswith(ignored)]
    assert (await listing(second_box)).splitlines() == wanted
    assert (before.splitlines() == wanted) == (not changes)


@pytest.mark.parametrize(
    "deed",
    [
        "truncate -s 200G hole",
        "truncate -s 200G a.txt",
        "for i in $(seq 3000); do : > $i.md; done",
        "seq 3000000 > text",
    ],
)
async def test_a_disk_that_the_agent_filled_is_its_own_result(box: Sandbox, deed: str) -> None:
    """Files that cannot fit are not read: reading holes of 200 GB would take more time than the stage has."""
    await prepare(box, "agent")
    await box.exec(deed, user="agent", cwd=WORKDIR, timeout=60)
    captured = await capture_diff(box, WORKDIR, 100_000, 60)
    assert not captured.diff and "above limits.max_patch_bytes (100000)" in captured.reason


async def test_a_small_change_of_a_large_file_is_no_large_diff(box: Sandbox) -> None:
    await prepare(box, "agent", [*PRE, f"seq 400000 > large && git add -A && {GIT} commit -qm large"])
    await box.exec("sed -i '1s/.*/one/' large && rm src/b.py", user="agent", cwd=WORKDIR)
    captured = await capture_diff(box, WORKDIR, 2_000, 60)
    assert not captured.reason and b"+one\n" in captured.diff and b"b.py" in captured.diff


@pytest.mark.parametrize("fills", ["/var/tmp/fill", "build.log"])
async def test_a_disk_without_room_leaves_the_diff(box: Sandbox, fills: str) -> None:
    """Outside of the repository, or in a file that it ignores; the agent fills the shared memory, too."""
    await prepare(box, "agent")
    zeros = f"cat /dev/zero >> {fills}; sync -f {fills}"  # writing out frees blocks that ext4 had reserved for it
    fill = f"echo more >> a.txt; {zeros}; for i in $(seq 9000); do echo > /tmp/$i || break; done; {zeros}"
    await box.exec(f"{fill}; cat /dev/zero > /dev/shm/.fill; true", user="agent", cwd=WORKDIR, timeout=120)
    free = await box.exec(f"stat -f -c '%a %S' {git_scripts.GIT_STATE}", user="root")
    blocks, block_bytes = map(int, free.stdout.split())
    assert blocks * block_bytes < 100_000, "the disk has no room for a diff of the greatest size"
    captured = await capture_diff(box, WORKDIR, 100_000, 60)
    assert not captured.reason and b"+more\n" in captured.diff


async def test_growth_counts_in_a_large_repository_too(box: Sandbox) -> None:
    """The least size, which no file had to be read for, is that of the file that has grown."""
    await prepare(box, "agent", [*PRE, f"head -c 3000000 /dev/urandom > large && git add -A && {GIT} commit -qm large"])
    await box.exec("truncate -s 2000004 a.txt", user="agent", cwd=WORKDIR)  # it had 4 bytes
    captured = await capture_diff(box, WORKDIR, 1000, 60)
    assert f"the diff of {2_000_000 // 1100} bytes is above" in captured.reason


_FAILING = {
    "no directory": 'mktemp() { case $2 in */ratchet/*) return 1 ;; esac; command mktemp "$@"; }',
    "no index": 'cp() { case $3 in */ratchet/*) return 1 ;; esac; command cp "$@"; }',
    "no object": 'git() { case "$GIT_INDEX_FILE" in */ratchet/*) return 1 ;; esac; command git "$@"; }',
}


@pytest.mark.parametrize("fails", _FAILING)
async def test_the_diff_is_taken_in_the_other_place_if_one_fails(box: Sandbox, fails: str) -> None:
    """A disk may lack inodes, or room for the objects, that its free bytes do not tell of."""
    await prepare(box, "agent")
    await box.exec("echo more >> a.txt; echo > /dev/shm/left", user="agent", cwd=WORKDIR)
    script = f"{_FAILING[fails]}\n{git_scripts.diff_script(WORKDIR, MAX_BYTES)}"
    result = await box.exec(script, user="root", timeout=60)
    assert b"+more\n" in parse_diff(result.stdout, MAX_BYTES).diff
    left = await box.exec(f"ls -d {git_scripts.GIT_STATE}/diff.* /dev/shm/*; true", user="root")
    assert left.stdout.startswith("/dev/shm/diff.") and len(left.stdout.splitlines()) == 1


@pytest.mark.parametrize(("memory", "place"), [(64, git_scripts.GIT_STATE), (500, "/dev/shm")])
async def test_a_diff_is_taken_in_the_roomier_place(box: Sandbox, memory: int, place: str) -> None:
    """With 300 MB left on the disk for a diff of up to 100 MB."""
    await prepare(box, "agent")
    await box.exec("echo more >> a.txt", user="agent", cwd=WORKDIR)
    free = f"case $4 in /dev/shm) echo '{memory} * 1000000' ;; *) echo '300 * 1000000' ;; esac"
    script = f"stat() {{ {free}; }}\n{git_scripts.diff_script(WORKDIR, 100_000_000)}\necho $own >&2"
    result = await box.exec(script, user="root", timeout=60)
    assert result.stderr.strip().startswith(f"{place}/diff.")


async def test_a_diff_that_is_too_large_is_said_to_be(box: Sandbox) -> None:
    await prepare(box, "agent")
    await box.exec("head -c 5000 /dev/urandom > big", user="agent", cwd=WORKDIR)
    result = await box.exec(git_scripts.diff_script(WORKDIR, 1000), user="root")
    captured = parse_diff(result.stdout, 1000)
    assert captured.diff == b"" and "above limits.max_patch_bytes (1000)" in captured.reason


async def test_an_earlier_try_that_still_runs_is_not_in_the_way(box: Sandbox) -> None:
    """A diff whose worker was killed still runs in the box, holds the lock of the index, and has written half of it."""
    await prepare(box, "agent")
    await box.exec("echo new > new.txt", user="agent", cwd=WORKDIR)
    expected = await taken(box)
    await box.exec(f"touch {git_scripts.BASE_GIT}/index.lock; echo half > {git_scripts.GIT_STATE}/patch", user="root")
    assert await taken(box) == expected != b""


@pytest.mark.parametrize("replaced", ["rm -rf {0} && ln -s /usr {0}", "rm -rf {0}"])
async def test_a_working_tree_that_is_gone_is_a_deletion(box: Sandbox, replaced: str) -> None:
    await prepare(box, "agent")
    await box.exec(replaced.format(shlex.quote(WORKDIR)), user="root", cwd="/")
    changes = split_diff(await taken(box))
    assert changes and all(change.deleted for change in changes)


# ---------------------------------------------------------------- odd repositories

ODD = {
    "no git at all": "echo 1 > a.txt",
    "empty": "true",
    "submodule": f"{GIT} init -q sub && cd sub && echo s > s.txt && git add -A && {GIT} commit -qm s && cd .. &&"
    f" {GIT} init -q . && echo 1 > a.txt"
    f" && {GIT} -c protocol.file.allow=always submodule --quiet add ./sub sub2 2>/dev/null; git add -A; {GIT}"
    f" commit -qm all",
    "lfs pointers": f"{GIT} init -q . && echo '*.bin filter=lfs diff=lfs merge=lfs -text' > .gitattributes"
    " && printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:0\\nsize 1\\n' > big.bin && echo 1 > a.txt"
    f" && git -c filter.lfs.clean=cat add -A && {GIT} commit -qm lfs",
    "bare repository inside": f"{GIT} init -q . && git init -q --bare fixtures/x.git && echo 1 > a.txt && git add"
    f" -A && {GIT} commit -qm all",
    "shallow and packed": f"{GIT} init -q . && for i in 1 2 3; do echo $i > a.txt; git add -A; {GIT} commit -qm"
    f" $i; git tag v$i; done; git gc -q"
    " && git remote add origin https://example.invalid/x && git stash -q || true",
    "wrong owner": f"{GIT} init -q . && echo 1 > a.txt && git add -A && {GIT} commit -qm all && chown -R 65534 .",
}


@pytest.mark.parametrize("kind", ODD)
async def test_odd_repositories(box: Sandbox, second_box: Sandbox, kind: str) -> None:
    workdir = "/workspace/odd ü"
    assert await prepare(box, "agent", [ODD[kind]], workdir) == await prepare(second_box, "grade", [ODD[kind]], workdir)
    status = await box.exec(
        "git status --porcelain; git log --oneline | wc -l; git remote; git stash list; git tag",
        user="agent",
        cwd=workdir,
    )
    assert status.stdout.strip() == "1", status.stdout
    await box.exec(
        "echo changed > a.txt; for d in sub sub2; do [ -d $d ] && echo more > $d/s.txt; done; true",
        user="agent",
        cwd=workdir,
    )
    diff = await taken(box, workdir)
    await put(second_box, diff, workdir)
    assert await listing(box, workdir) == await listing(second_box, workdir)


async def test_the_agents_box_keeps_no_future(box: Sandbox) -> None:
    """All objects and names of the original history are gone: commits, branches, tags, reflog, stashes, packs."""
    future = (
        f"{GIT} init -q . && echo 1 > a.txt && git add -A && {GIT} commit -qm base && echo FUTURE-FIX > a.txt &&"
        f" {GIT} commit -qam future"
        f" && git tag later && git branch ahead && git reset -q --hard HEAD~1 && echo STASHED-FIX > a.txt && {GIT}"
        f" stash -q && git gc -q"
        " && git update-ref refs/remotes/origin/main later && git remote add origin /nowhere"
    )
    await prepare(box, "agent", [future])
    seen = await box.exec(
        "git log --all --oneline | wc -l; git reflog | wc -l; git for-each-ref | wc -l; git remote | wc -l; ls"
        " .git/objects/pack | wc -l;"
        " for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done"
        " | grep -c FIX; true;"
        " cat /run/ratchet/* 2>&1 | grep -c FIX; true",
        user="agent",
        cwd=WORKDIR,
    )
    assert seen.stdout.split() == ["1", "0", "1", "0", "0", "0", "0"], seen.stdout


# ---------------------------------------------------------------- random edits

_NAMES = st.sampled_from(
    [
        "a.txt",
        "src",
        "src/b.py",
        "src/c/d.py",
        "new",
        "new/x y",
        "link",
        "bin",
        "d ir/ü.txt",
        "win.txt",
        ".gitattributes",
    ]
)
_CONTENT = st.one_of(
    st.sampled_from(
        [
            b"",
            b"one\n",
            b"two\r\n",
            b"no newline",
            b"\x00\x01\xff",
            b"diff --git a/x b/x\n--- a/x\n",
            b"* text=auto eol=crlf\n",
        ]
    ),
    st.binary(max_size=300),
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n"]), max_size=60).map(b"".join),
)
_EDIT = st.one_of(
    st.tuples(st.just("write"), _NAMES, _CONTENT),
    st.tuples(st.just("remove"), _NAMES, st.just(b"")),
    st.tuples(st.just("link"), _NAMES, st.sampled_from([b"a.txt", b"src", b"/nowhere", b"../up"])),
    st.tuples(st.just("chmod"), _NAMES, st.sampled_from([b"755", b"644"])),
    st.tuples(st.just("move"), _NAMES, st.sampled_from([b"moved", b"src2", b"deep/er/name"])),
    st.tuples(
        st.just("git"),
        _NAMES,
        st.sampled_from([b"add -A", b"commit -qam x", b"checkout -q -b b", b"stash -q", b"rm -q --cached a.txt"]),
    ),
)


def _command(edit: tuple[str, str, bytes]) -> str:
    kind, name, value = edit
    path, text = shlex.quote(name), base64.b64encode(value).decode()
    parent = f'mkdir -p "$(dirname {path})"'
    word = value.decode() if kind in ("link", "chmod", "move", "git") else ""
    argument = shlex.quote(word)
    return {
        "write": f"rm -rf {path}; {parent}; echo {text} | base64 -d > {path}",
        "remove": f"rm -rf {path}",
        "link": f"rm -rf {path}; {parent}; ln -s {argument} {path}",
        "chmod": f"chmod {argument} {path}",
        "move": f'mkdir -p "$(dirname {argument})"; mv {path} {argument}',
        "git": f"{GIT} {word}",
    }[kind]


async def test_any_patch_that_was_taken_applies(box_gateway: GatewayProcess) -> None:
    """Random edits: the fresh box ends with the same files, byte for byte, and the joined sections are the patch."""
    provider = provider_of(box_gateway)
    agent: Any = await provider.create("host", ttl_seconds=1800, metadata={}, idempotency_key="edits-a")
    fresh: Any = await provider.create("host", ttl_seconds=1800, metadata={}, idempotency_key="edits-b")
    count = 0

    async def check(edits: list[tuple[str, str, bytes]]) -> None:
        nonlocal count
        count += 1
        workdir = f"/workspace/{hashlib.sha256(repr(edits).encode()).hexdigest()[:8]}-{count}"
        await prepare(agent, "agent", PRE, workdir)
        script = "\n".join(f"{{ {_command(edit)}; }} 2>/dev/null || true" for edit in edits)
        await agent.exec(script, user="agent", cwd=workdir, timeout=120)
        diff = await taken(agent, workdir)
        assert join_diff(split_diff(diff)) == diff
        await prepare(fresh, "grade", PRE, workdir)
        if diff:
            await put(fresh, diff, workdir)
        assert await listing(agent, workdir) == await listing(fresh, workdir), (edits, diff)

    try:
        for edits in examples(30):
            await check(edits)
    finally:
        await agent.kill()
        await fresh.kill()


def examples(number: int) -> list[list[tuple[str, str, bytes]]]:
    """Draw examples by hypothesis outside the test, because its runner and an event loop do not mix; always the
    same."""
    found: list[list[tuple[str, str, bytes]]] = []

    @settings(
        max_examples=number, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(_EDIT, min_size=1, max_size=8))
    def draw(edits: list[tuple[str, str, bytes]]) -> None:
        found.append(edits)

    draw()
    return found
