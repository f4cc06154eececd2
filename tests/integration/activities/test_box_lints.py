"""The findings of `ratchet tasks check --boxes`."""

from activities.datasets.box_lints import lint_boxes
from store.tasks import TaskFields
from tests.integration.sandbox_gateway.conftest import GatewayProcess, provider_of

_REPOSITORY = "git init -q . && echo 'built/' > .gitignore && echo one > a.txt && git add -A"


def row(image: str, *pre_commands: str) -> TaskFields:
    spec = {"problem_statement": "fix it", "pre_commands": list(pre_commands)}
    return TaskFields(label="one", image=image, workdir="/workspace/r", grader="eval_cmd", spec=spec)


async def lints(gateway: GatewayProcess, task: TaskFields) -> list[str]:
    return [text async for text in lint_boxes(provider_of(gateway), [task])]


async def test_a_clean_box_has_no_findings(box_gateway: GatewayProcess) -> None:
    assert await lints(box_gateway, row("host", _REPOSITORY)) == []


async def test_ignored_files_and_leftovers_are_named(box_gateway: GatewayProcess) -> None:
    make = f"{_REPOSITORY} && mkdir built && echo x > built/lib.so && mkdir /var/tmp/build && touch /tmp/log$(printf 1)"
    ignored, left = await lints(box_gateway, row("host", make))
    assert ignored.startswith("image host (task one): the agent can read ignored files in the workdir: built/;")
    assert "/tmp/log1, /var/tmp/build;" in left


async def test_a_box_that_cannot_be_prepared_is_named(box_gateway: GatewayProcess) -> None:
    for task in (row("host", "exit 7"), row("no/such:image")):
        (finding,) = await lints(box_gateway, task)
        assert finding.startswith(f"image {task['image']} (task one): cannot be prepared: ")
