"""No commit of a task's repository but the base can be read in the agent's box, however the repository was made."""

import shlex

import pytest

from grading import git_scripts
from sandboxes.base import Sandbox

pytestmark = pytest.mark.timeout(600)
GOLD = "the gold fix"
GIT = "git -c user.name=a -c user.email=a@a -c protocol.file.allow=always -c safe.directory='*'"
# A repository at $1 whose second commit is the gold fix; the working tree stands at the first.
MAKE = f"""
set -e
make() {{
  mkdir -p "$1/pkg" && cd "$1" && {GIT} init -q -b main . && echo one > a.txt && echo two > pkg/b.txt
  printf '*.log\\nbuilt/\\n' > .gitignore && mkdir -p pkg/built && echo kept > pkg/built/kept && {GIT} add -A
  {GIT} add -f pkg/built/kept && {GIT} commit -qm base
  echo '{GOLD}' > a.txt && echo '{GOLD}' > pkg/b.txt && {GIT} commit -qam gold && {GIT} tag gold
  {GIT} checkout -q --detach HEAD~1
}}
other() {{
  mkdir -p "$1" && cd "$1" && {GIT} init -q . && echo unrelated > u.txt && {GIT} add -A && {GIT} commit -qm u
}}
"""
REPOSITORIES: dict[str, tuple[str, str]] = {
    "plain": ("make /workspace/r", "/workspace/r"),
    "packed": (f"make /workspace/r && {GIT} gc -q && {GIT} pack-refs --all", "/workspace/r"),
    "a directory of a monorepo": ("make /workspace/mono", "/workspace/mono/pkg"),
    "a directory of a monorepo that is a linked worktree": (
        f"make /srv/main && {GIT} worktree add -q /workspace/wt HEAD",
        "/workspace/wt/pkg",
    ),
    "a linked worktree": (f"make /srv/main && {GIT} worktree add -q /workspace/wt HEAD", "/workspace/wt"),
    "a worktree in its bare repository": (
        f"make /srv/main && {GIT} clone -q --bare /srv/main /srv/bare.git && cd /srv/bare.git"
        f" && {GIT} worktree add -q /srv/bare.git/wt gold~1 && rm -rf /srv/main",
        "/srv/bare.git/wt",
    ),
    "a git directory elsewhere": (
        "make /workspace/r && mv .git /srv/g && echo 'gitdir: /srv/g' > .git",
        "/workspace/r",
    ),
    "a relative git directory elsewhere": (
        "make /workspace/r && mv .git /workspace/.r-git && echo 'gitdir: ../.r-git' > .git",
        "/workspace/r",
    ),
    "a link to the git directory": ("make /workspace/r && mv .git /srv/g && ln -s /srv/g .git", "/workspace/r"),
    "a link to a git directory in the working tree": ("make /workspace/r && mv .git g && ln -s g .git", "/workspace/r"),
    "a working tree in a submodule": (
        f"make /srv/m && {GIT} init -q /workspace/super && cd /workspace/super && {GIT} submodule -q add /srv/m sub"
        f" && {GIT} -C sub checkout -q gold~1",
        "/workspace/super/sub",
    ),
    "a repository of another tool over the same objects": (
        f"make /workspace/r && mkdir -p .jj/repo/store && {GIT} clone -q --bare . .jj/repo/store/git",
        "/workspace/r",
    ),
    "a working tree reached by a link": ("make /srv/mono && ln -s /srv/mono/pkg /workspace/r", "/workspace/r"),
    "clone --shared": (
        f"make /srv/o && {GIT} clone -q --shared /srv/o /workspace/r && cd /workspace/r && {GIT} checkout -q gold~1"
        f" && {GIT} remote remove origin",
        "/workspace/r",
    ),
    "alternates of alternates, relative": (
        f"make /srv/o && {GIT} clone -q --shared /srv/o /srv/p && {GIT} clone -q --shared /srv/p /workspace/r"
        f" && cd /workspace/r && {GIT} checkout -q gold~1 && {GIT} remote remove origin"
        " && echo ../../../srv/p/.git/objects > .git/objects/info/alternates"
        " && realpath --relative-to=.git/objects /srv/p/.git/objects > .git/objects/info/alternates",
        "/workspace/r",
    ),
    "objects behind a link": (
        "make /workspace/r && mv .git/objects /srv/store && ln -s /srv/store .git/objects",
        "/workspace/r",
    ),
    "a pack behind a link": (
        f"make /workspace/r && {GIT} gc -q && mkdir /srv/packs && mv .git/objects/pack/* /srv/packs"
        " && ln -s /srv/packs/* .git/objects/pack",
        "/workspace/r",
    ),
    "a submodule with its git directory elsewhere": (
        "make /srv/m && mv .git /srv/modules && make /workspace/r"
        " && mkdir sub && echo 'gitdir: /srv/modules' > sub/.git",
        "/workspace/r",
    ),
    "a submodule in the usual place": (
        f"make /srv/m && make /workspace/r && {GIT} submodule -q add /srv/m sub && {GIT} commit -qm sub",
        "/workspace/r",
    ),
    "a link to a directory of another checkout": (
        "make /srv/lib && make /workspace/r && ln -s /srv/lib/pkg vendored",
        "/workspace/r",
    ),
    "a local remote": (
        f"make /srv/up && {GIT} clone -q --no-hardlinks /srv/up /workspace/r && cd /workspace/r"
        f" && {GIT} checkout -q gold~1",
        "/workspace/r",
    ),
    "a mirror that nothing names": (
        f"make /workspace/r && {GIT} clone -q --mirror . /opt/mirror && {GIT} -C /opt/mirror gc -q",
        "/workspace/r",
    ),
    "a bundle beside the repository": (
        f"make /workspace/r && {GIT} bundle create -q ../r.bundle --all",
        "/workspace/r",
    ),
    "a bundle of the new commits only": (
        f"make /workspace/r && {GIT} bundle create -q /var/tmp/new.bundle gold~1..gold",
        "/workspace/r",
    ),
    "a bundle of any name beside the repository": (
        f"make /workspace/r && {GIT} bundle create -q ../upstream --all",
        "/workspace/r",
    ),
    "a bundle that is a remote": (
        f"make /srv/o && {GIT} bundle create -q /srv/seed --all && {GIT} clone -q /srv/seed /workspace/r"
        f" && rm -rf /srv/o && cd /workspace/r && {GIT} checkout -q gold~1",
        "/workspace/r",
    ),
    "a copy of .git in the working tree": ("make /workspace/r && cp -r .git .git.orig", "/workspace/r"),
    "a history that was cut": (
        f"make /workspace/r && cp -r /workspace/r /opt/full && {GIT} checkout -q --orphan cut && {GIT} commit -qm cut"
        f" && {GIT} tag -d gold && {GIT} branch -qD main && {GIT} reflog expire --expire=now --all"
        f" && {GIT} gc -q --prune=now",
        "/workspace/r",
    ),
    "a neighbour's checkout": (f"make /workspace/r && {GIT} clone -q . /workspace/copy", "/workspace/r"),
}
"""The script that makes the box's repository, and the task's workdir."""

# Every object of every file that the user may read: loose ones, packs, and packs inside bundles. Files that are older
# than the repository are the machine's own; nothing sets the time of a change back.
READ_OBJECTS = """
import os, shutil, subprocess, tempfile, zlib
gold = b"the gold fix"
began = os.stat("/tmp/began").st_ctime
store = tempfile.mkdtemp()
subprocess.run(["git", "init", "-q", "--bare", store], check=True)
leaks = set()
for top, _folders, files in os.walk("/"):
    if top.startswith(("/proc", "/sys", "/dev", "/usr", "/opt/ratchet", "/opt/agents", store)):
        continue
    for name in files:
        path = os.path.join(top, name)
        try:
            if os.stat(path).st_ctime < began:
                continue
            data = open(path, "rb").read() if os.path.isfile(path) else b""
        except OSError:
            continue
        start = data.find(b"PACK\\0\\0\\0\\2")
        if start >= 0:
            subprocess.run(["git", "-C", store, "unpack-objects", "-q", "-r"], input=data[start:], check=False)
        try:
            if gold in zlib.decompress(data):
                leaks.add(path)
        except zlib.error:
            pass
blobs = subprocess.run(
    ["git", "-C", store, "cat-file", "--batch", "--batch-all-objects"], capture_output=True, check=True
).stdout
if gold in blobs:
    leaks.add("a pack")
shutil.rmtree(store)
print(*sorted(leaks), sep="\\n")
"""


async def make(box: Sandbox, setup: str) -> None:
    await box.exec(f"touch /tmp/began\n{MAKE}{setup}", timeout=120)


async def prepare(box: Sandbox, workdir: str, *, agent: bool) -> str:
    script = git_scripts.prepare_script(workdir, [], "fix it" if agent else None, keep_history=not agent)
    return (await box.exec(script, timeout=120)).stdout.strip().splitlines()[-1]


async def readable(box: Sandbox) -> list[str]:
    found = await box.exec(f"/opt/ratchet/bin/python3 - <<'E'\n{READ_OBJECTS}\nE", user="agent", timeout=120)
    return found.stdout.split("\n")[:-1] if found.stdout.strip() else []


@pytest.mark.parametrize("case", REPOSITORIES)
async def test_only_the_base_commit_can_be_read(box: Sandbox, second_box: Sandbox, case: str) -> None:
    setup, workdir = REPOSITORIES[case]
    for one in (box, second_box):
        await make(one, f"{setup}\nchmod -R a+rX /srv /workspace /opt/full /opt/mirror 2>/dev/null || true")
    assert GOLD in (await box.exec(f"grep -rha gold {workdir}/ /srv; echo '{GOLD}'")).stdout
    assert await readable(box), "the case hides nothing"
    assert await prepare(box, workdir, agent=True) == await prepare(second_box, workdir, agent=False)
    assert await readable(box) == []
    assert await readable(second_box) == []
    ours = "git -c safe.directory='*'"
    log = await box.exec(f"{ours} log --all --format=%s && {ours} status --short", user="agent", cwd=workdir)
    assert log.stdout == "base\n"
    if case != "a history that was cut":
        kept = f"git --git-dir={git_scripts.ORIGINAL_GIT} -c safe.directory='*' show gold:a.txt"
        assert (await second_box.exec(kept)).stdout == f"{GOLD}\n"


@pytest.mark.parametrize("workdir", ["/workspace/r", "/workspace/with 'quotes' and\ttabs"])
async def test_other_repositories_stay_readable(box: Sandbox, workdir: str) -> None:
    """A package manager's clones and a product's own test data are no history of the task."""
    place = shlex.quote(workdir)
    await make(
        box,
        f"other /opt/cache && other /tmp/o && make {place} && {GIT} clone -q --bare /tmp/o data.git"
        f" && {GIT} -C /tmp/o bundle create -q {place}/data.bundle --all && {GIT} add -A && {GIT} commit -qm data"
        " && chmod -R a+rX /workspace /opt/cache",
    )
    await prepare(box, workdir, agent=True)
    for read in ("--git-dir=/opt/cache/.git show HEAD:u.txt", "--git-dir=data.git show HEAD:u.txt"):
        assert (await box.exec(f"git {read}", user="agent", cwd=workdir)).stdout == "unrelated\n"
    assert "HEAD" in (await box.exec("git bundle list-heads data.bundle", user="agent", cwd=workdir)).stdout
    tracked = (await box.exec("git ls-files", user="agent", cwd=workdir)).stdout.split()
    assert {"data.bundle", "data.git/HEAD", "pkg/built/kept"} <= set(tracked)


async def test_a_history_that_cannot_be_hidden_is_refused(box: Sandbox) -> None:
    """/usr is read-only here, as an image's volume may be."""
    setup = "make /workspace/r && rm -rf .git && echo 'gitdir: /usr' > .git"
    await make(box, setup)
    script = git_scripts.prepare_script("/workspace/r", [], "fix it")
    refused = await box.exec(script, check=False)
    assert refused.exit_code != 0 and "/usr" in refused.stderr and "cannot be hidden" in refused.stderr
