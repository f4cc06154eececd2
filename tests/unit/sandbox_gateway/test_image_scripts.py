"""The environment that an Apptainer image's scripts set, read without a shell, against what a shell makes of it."""

import subprocess

import pytest

from sandbox_gateway.boxd.command_launch import SYSTEM_PATH
from sandbox_gateway.image_unpack import read_scripts

TAKEN = (
    "export LC_ALL=C",
    "  export A='single $B' # why",
    'export A="two words";',
    'export A="a \\"quoted\\" \\$word \\n"',
    "export PATH=/opt/bin:$PATH",
    "PATH=${PATH}:/opt/bin",
    "export LD_LIBRARY_PATH=/cuda/lib:$LD_LIBRARY_PATH",
    "export ROOT=/opt/x\nexport BIN=$ROOT/bin\nROOT=/opt/y",
    'export A="${A:-"yes and = more"}"',
    'export GIVEN="${GIVEN:-"other"}"\nexport GIVEN=${GIVEN:-}',
    "# export A=no",
    "export A=/long/\\\npath",
    "export A=",
)
LEFT = (
    "export A=$HOME/bin",
    "export A=$(id -u)",
    "export A=`id -u`",
    'export A="${A:-$(id)}"',
    "export A=~/bin",
    "export A=b C=d",
    "A=not-exported",
    "export A=1; B=2",
    "set -e",
    ". /opt/setup.sh",
    "if [ -d /nowhere ]; then\n  export A=conditional\nfi",
    "for one in a b; do\n  export A=$one\n  export B=c\ndone",
    'export A="first\nexport B=second\n"',
    "export A=" + "x" * 5000,
)


def shell(script: str, given: dict[str, str]) -> dict[str, str]:
    environment = {"PATH": SYSTEM_PATH, **given}
    done = subprocess.run(
        ["sh", "-c", f"{script}\nenv -0"], env=environment, capture_output=True, text=True, check=True
    )
    pairs = (entry.partition("=") for entry in done.stdout.split("\0") if entry)
    return {name: value for name, _, value in pairs if name not in ("PWD", "_", "SHLVL", "OLDPWD")}


@pytest.mark.parametrize("script", TAKEN)
def test_an_assignment_is_read_as_a_shell_does(script: str) -> None:
    given = {"GIVEN": "the config's"}
    env = dict(given)
    assert read_scripts(script, env) == []
    assert {"PATH": SYSTEM_PATH, **env} == shell(script, given)


@pytest.mark.parametrize("script", LEFT)
def test_what_needs_a_shell_is_left_out_and_named(script: str) -> None:
    env: dict[str, str] = {}
    assert read_scripts(script, env)[0] == script.split("\n")[0] and env == {}


def test_what_follows_a_block_is_read() -> None:
    env: dict[str, str] = {}
    left_out = read_scripts("if true; then\n  export A=b\nfi\nif true; then :; fi\nexport C=d", env)
    assert env == {"C": "d"} and len(left_out) == 4
