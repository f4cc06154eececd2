"""The findings of `ratchet tasks check --boxes`."""

from activities.datasets.box_lints import lint_boxes
from store.tasks import TaskFields
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, provider_of
from tests.standins.switched_network import SwitchedProvider

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


async def test_a_row_that_opens_the_network_for_its_pre_commands(box_gateway: GatewayProcess) -> None:
    """It is prepared as for grading, and its network is closed before anything else is done in the box."""
    task = row("host", _REPOSITORY, "test $(cat /run/network) = 'OpenedFirst(then=False)'", "cp /run/network /tmp/seen")
    task["spec"]["network"] = ["pre_commands"]
    settings = box_gateway.settings
    provider = SwitchedProvider(API_KEY, box_gateway.url, box_gateway.url, max_ttl_seconds=settings.max_ttl_seconds)
    (left,) = [text async for text in lint_boxes(provider, [task])]
    assert "files in temporary directories: /tmp/seen;" in left
    assert provider.closed == [False]


async def test_a_box_that_cannot_be_prepared_is_named(box_gateway: GatewayProcess) -> None:
    for task in (row("host", "exit 7"), row("no/such:image")):
        (finding,) = await lints(box_gateway, task)
        assert finding.startswith(f"image {task['image']} (task one): cannot be prepared: ")
