"""Harbor's verifier: the tests lie at `/tests`, and the verdict is the reward file that their script writes.

By the format's convention the script's exit code means nothing, and `reward.json` counts if there are both files. The
directories below `/logs` are made anew for the script's user right before the script starts, and root reads the
file when all processes of the script are dead.
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
mkdir -p {_DIRECTORY} /logs/agent /logs/artifacts
chown "$TESTS_USER": {_DIRECTORY} /logs/agent /logs/artifacts
tar -cf {RUNNER_STATE}/tests.tar -T {RUNNER_STATE}/tests
tar -xf {RUNNER_STATE}/tests.tar -C / --no-same-owner
rm {RUNNER_STATE}/tests.tar
find /tests -name '*.sh' -exec sed -i 's#\\bPYTHONPATH=#&{WITNESS_DIRECTORY}:#g' {{}} +"""
_READ = f"""for file in {_JSON} {_TEXT}; do
  if [ -f "$file" ] && [ ! -L "$file" ]; then echo "$file $(head -c {_MAX_BYTES + 1} "$file" | base64 | tr -d '\\n')"
  elif [ -e "$file" ] || [ -L "$file" ]; then echo "$file -"; fi
done"""


@dataclass(slots=True, frozen=True)
class VerifierReward:
    """`values`: the finite numbers of the file by key, None if there is no verdict. `text`: what the file says, or why
    it says nothing."""

    values: dict[str, float] | None
    text: str


async def lay_out_tests(box: Sandbox, workdir: str, paths: Iterable[str], user: str) -> None:
    """Copy the tests to the root directory, and make the reward file's directory anew for the tests' user.

    The witness stays on the module path if a script sets PYTHONPATH. `paths`: relative to the workdir, each below
    `tests/`. Raises UnusableBoxError if the box refuses.
    """
    await box.write_file(f"{RUNNER_STATE}/tests", "".join(f"{path}\n" for path in paths), user="root")
    await _execute(box, f"TESTS_USER={user}\n{_LAY_OUT}", workdir)


async def read_reward(box: Sandbox) -> VerifierReward:
    """Read the reward as root, after the script's processes have ended. Raises UnusableBoxError if the box refuses."""
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
    """Return the rewards of `reward.json`, an object of numbers, else `reward.txt`. Content None: no regular file."""
    path = next((path for path in (_JSON, _TEXT) if path in files), None)
    if path is None:
        return VerifierReward(None, f"the tests' script wrote neither {_JSON} nor {_TEXT}")
    content = files[path]
    if content is None:
        return VerifierReward(None, f"{path} is no regular file")
    if len(content) > _MAX_BYTES:
        return VerifierReward(None, f"{path} is larger than {_MAX_BYTES} bytes")
    text = content.decode("utf-8-sig", "replace").strip()
    if not text:
        return VerifierReward(None, f"{path} is empty")
    values = _numbers_of(path, text)
    if not values or not all(map(math.isfinite, values.values())):
        wanted = "an object of finite numbers" if path == _JSON else "a finite number"
        return VerifierReward(None, f"{path}: expected {wanted}, found {text[:100]!r}")
    return VerifierReward(values, f"{path} says " + ", ".join(f"{key} {value:g}" for key, value in values.items()))


def _numbers_of(path: str, text: str) -> dict[str, float]:
    """Return the file's numbers, that of `reward.txt` as `reward`; nan in place of a value that is none."""
    try:
        parsed = orjson.loads(text) if path == _JSON else {"reward": float(text)}
    except ValueError:
        return {}
    items = parsed.items() if isinstance(parsed, dict) else ()
    return {key: float(value) if isinstance(value, int | float) else math.nan for key, value in items}
