"""Harbor's verifier: the tests lie at `/tests`, and the verdict is the reward file that their script writes.

By the format's convention the script's exit code means nothing. The directory of the reward file is made anew for the
unprivileged user right before the script starts, and root reads the file when all processes of the script are dead.
"""

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from grading.run_hidden_tests import RUNNER_STATE, WITNESS_DIRECTORY, UnusableBoxError
from ratchet.errors import CommandFailedError
from sandboxes.base import Sandbox

HARBOR = "harbor"
_DIRECTORY = "/logs/verifier"
_TEXT, _JSON = f"{_DIRECTORY}/reward.txt", f"{_DIRECTORY}/reward.json"
_MAX_BYTES = 65_536
_SECONDS = 120.0
_LAY_OUT = f"""set -e
rm -rf {_DIRECTORY}
mkdir -p {_DIRECTORY}
chown agent: {_DIRECTORY}
tar -cf {RUNNER_STATE}/tests.tar -T {RUNNER_STATE}/tests
tar -xf {RUNNER_STATE}/tests.tar -C / --no-same-owner
rm {RUNNER_STATE}/tests.tar
find /tests -name '*.sh' -exec sed -i 's#\\bPYTHONPATH=#&{WITNESS_DIRECTORY}:#g' {{}} +"""
_READ = f"""for file in {_TEXT} {_JSON}; do
  if [ -f "$file" ] && [ ! -L "$file" ]; then echo "$file $(head -c {_MAX_BYTES + 1} "$file" | base64 | tr -d '\\n')"
  elif [ -e "$file" ] || [ -L "$file" ]; then echo "$file -"; fi
done"""


@dataclass(slots=True, frozen=True)
class VerifierReward:
    """`value`: 1 or 0, None if there is no verdict. `text`: what the file says, or why it says nothing."""

    value: int | None
    text: str


async def lay_out_tests(box: Sandbox, workdir: str, paths: Iterable[str]) -> None:
    """Copy the tests to the root directory, and make the reward file's directory anew.

    The witness stays on the module path if a script sets PYTHONPATH. `paths`: relative to the workdir, each below
    `tests/`. Raises UnusableBoxError if the box refuses.
    """
    await box.write_file(f"{RUNNER_STATE}/tests", "".join(f"{path}\n" for path in paths), user="root")
    await _execute(box, _LAY_OUT, workdir)


async def read_reward(box: Sandbox) -> VerifierReward:
    """Read the reward as root, after all processes of the script have ended.

    Raises UnusableBoxError if the box refuses.
    """
    lines = (await _execute(box, _READ, "/")).splitlines()
    return parse_reward({path: _content(text) for path, _, text in (line.partition(" ") for line in lines)})


async def _execute(box: Sandbox, script: str, directory: str) -> str:
    try:
        return (await box.exec(script, user="root", cwd=directory, timeout=_SECONDS)).stdout
    except CommandFailedError as error:
        raise UnusableBoxError(f"the grading box cannot provide {_DIRECTORY} and /tests: {error}") from error


def _content(text: str) -> bytes | None:
    return None if text == "-" else base64.b64decode(text)


def parse_reward(files: Mapping[str, bytes | None]) -> VerifierReward:
    """Return the reward of `reward.txt`, a number, or `reward.json`, an object with the number `reward`.

    A value of None: the file is no regular one. Only 0 and 1 are verdicts; other numbers are not rounded.
    """
    found = [_parse(path, content) for path, content in files.items()]
    if not found:
        return VerifierReward(None, f"the tests' script wrote neither {_TEXT} nor {_JSON}")
    wrong = next((reward for reward in found if reward.value is None), None)
    if wrong is not None:
        return wrong
    if len({reward.value for reward in found}) > 1:
        return VerifierReward(None, f"{_TEXT} and {_JSON} differ: " + ", ".join(reward.text for reward in found))
    return found[0]


def _parse(path: str, content: bytes | None) -> VerifierReward:
    if content is None:
        return VerifierReward(None, f"{path} is no regular file")
    if len(content) > _MAX_BYTES:
        return VerifierReward(None, f"{path} is larger than {_MAX_BYTES} bytes")
    text = content.decode("utf-8-sig", "replace").strip()
    if not text:
        return VerifierReward(None, f"{path} is empty")
    number = _number_of(path, text)
    if number not in (0.0, 1.0):
        wanted = 'an object with the number "reward", 0 or 1' if path == _JSON else "0 or 1"
        return VerifierReward(None, f"{path}: expected {wanted}, found {text[:100]!r}")
    return VerifierReward(int(number), f"{path} says {int(number)}")


def _number_of(path: str, text: str) -> float:
    """Return the reward, nan if the text has none."""
    try:
        if path != _JSON:
            return float(text)
        parsed = orjson.loads(text)
    except ValueError:
        return math.nan
    value = parsed.get("reward") if isinstance(parsed, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
