"""Find ignored files and leftovers of the preparation that a prepared box shows an agent beside the tracked files.

They may have been built from the solution. They cannot be removed without a person's judgement, because dependencies
and build products of the base are wanted, so `ratchet tasks check --boxes` names them.
"""

import shlex
import uuid
from collections.abc import AsyncIterator, Iterable

from activities.box_lifecycle import network_of
from grading import git_scripts
from grading.grading_box import close_network, upload_archive
from ratchet.errors import CommandFailedError, ConfigError, GraderFailedError
from ratchet.types import SandboxRole
from sandboxes.base import Sandbox, SandboxProvider
from store.tasks import TaskFields

_TTL_SECONDS = 3600
_NUM_NAMED = 5
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


async def lint_boxes(provider: SandboxProvider, rows: Iterable[TaskFields]) -> AsyncIterator[str]:
    """Prepare the first row of each image in a grading box; yield one sentence per kind of finding."""
    for row in rows:
        subject = f"image {row['image']} (task {row['label']})"
        try:
            network = network_of(SandboxRole.GRADE, row["spec"].get("network") or ())
            box = await provider.create(
                row["image"], ttl_seconds=_TTL_SECONDS, metadata={}, idempotency_key=uuid.uuid4().hex, network=network
            )
            async with box:
                for finding in await _findings(box, row):
                    yield f"{subject}: {finding}"
        except (CommandFailedError, ConfigError, GraderFailedError) as error:
            yield f"{subject}: cannot be prepared: {error}"


async def _findings(box: Sandbox, row: TaskFields) -> list[str]:
    archive = await upload_archive(box, row["spec"])
    script = git_scripts.prepare_script(row["workdir"], row["spec"]["pre_commands"], "", archive=archive)
    await box.exec(script, user="root", timeout=_TTL_SECONDS)
    await close_network(box, row["spec"].get("network") or (), SandboxRole.GRADE)
    directory = shlex.quote(row["workdir"])
    ignored = await _names(
        box,
        f"cd {directory} && git --git-dir={git_scripts.BASE_GIT} --work-tree={directory}"
        " ls-files -z --others --ignored --exclude-standard --directory",
    )
    left = await _names(box, f"find {' '.join(_TEMPORARY)} -mindepth 1 -maxdepth 1 -print0 2>/dev/null")
    return [
        *_sentence("ignored files in the workdir", [name for name in ignored if name != git_scripts.STATEMENT]),
        *_sentence("files in temporary directories", left),
    ]


async def _names(box: Sandbox, command: str) -> list[str]:
    listed = await box.exec(f"{command} | tr '\\0' '\\n'", user="root", timeout=_TTL_SECONDS)
    return sorted(listed.stdout.splitlines())


def _sentence(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [
        f"the agent can read {what}: {', '.join(names[:_NUM_NAMED])}{more};"
        " remove what was made from the solution, by a pre_command or in the image"
    ]
