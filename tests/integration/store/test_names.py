"""Each form of a name points at the same thing, from each page, table or log."""

from pathlib import Path
from urllib.parse import quote

import pytest

from ratchet.errors import ConfigError
from ratchet.run_names import require_target_name
from store.database import Database
from store.names import Kind, Named, require_named
from store.steering_targets import find_target
from tests.integration.viewer.filled_store import FilledRun, fill_run

UI = "http://127.0.0.1:8233/namespaces/default/workflows/"
FORMS = {
    Kind.RUN: [
        "{run}", "run/{run}", " {run} ", "http://h:8420/runs/{run}", "https://h/runs/{run}/tasks?a=b#c",
        UI + "{ui_run}/1-2/history",
    ],
    Kind.STEP: ["{run}@1", "http://h/runs/{run}/steps/1", "/runs/{run}/steps/1"],
    Kind.GROUP: ["group/{run}/0", "{run}/0", UI + "{ui_group}", "http://h/groups/{group}"],
    Kind.ROLLOUT: [
        "{rollout}", "#{rollout}", "{name}", "{short}", "{shortest}", "http://h/rollouts/{rollout}#turn-7",
        "http://h/rollouts/{rollout}/turns/7?token=a", UI + "{ui_name}/1-2/history",
    ],
    Kind.EVALUATION: ["evaluate/{run}/start-greedy", UI + "evaluate%2F{run}%2Fstart-greedy/1-2"],
    Kind.TASK: ["{label}", "http://h/tasks/{task}"],
}  # fmt: skip
CASES = [(kind, form) for kind, forms in FORMS.items() for form in forms]


@pytest.fixture
async def filled(database: Database, run_id: str, model: Path) -> FilledRun:
    return await fill_run(database, run_id, model)


def written(form: str, filled: FilledRun) -> str:
    name = f"rollout/{filled.run_id}/{filled.trained_group}/0"
    return form.format(
        run=filled.run_id,
        group=filled.trained_group,
        rollout=filled.solved,
        name=name,
        short=name.removeprefix("rollout/"),
        shortest=f"{filled.trained_group}/0",
        task=filled.task,
        label="shop-0",
        ui_run=quote(f"run/{filled.run_id}", safe=""),
        ui_group=quote(f"group/{filled.run_id}/0", safe=""),
        ui_name=quote(name, safe=""),
    )


@pytest.mark.parametrize(("kind", "form"), CASES)
async def test_each_form_is_understood_and_names_what_it_is_if_another_kind_is_asked(
    kind: Kind, form: str, filled: FilledRun, database: Database
) -> None:
    text = written(form, filled)
    number = {"step": 1, "group": filled.trained_group, "rollout": filled.solved, "task": filled.task}
    async with database.begin() as connection:
        found = await require_named(connection, text, kind)
        assert (found.kind, found.id) == (kind, number.get(kind, 0))
        assert found.run_id == ("" if kind is Kind.TASK else filled.run_id)
        other = Kind.STEP if kind is Kind.RUN else Kind.RUN
        with pytest.raises(ConfigError, match=f"is a {kind}.*; name a {other}"):
            await require_named(connection, text, other)
        if kind in (Kind.GROUP, Kind.ROLLOUT, Kind.EVALUATION) and not ("://" in form and "workflows" not in form):
            assert require_target_name(text) == text
            target = await find_target(connection, text)
            assert (target.kind, target.id, target.workflow_id) == (kind, found.id, found.name)


async def test_a_task_points_at_its_newest_rollout(filled: FilledRun, database: Database) -> None:
    async with database.begin() as connection:
        found = await require_named(connection, "shop-0", Kind.RUN, Kind.ROLLOUT)
    assert found.kind is Kind.ROLLOUT


UNKNOWN = [
    "nobody", "nobody@3", "rollout/nobody/0/0", "9" * 18, "9" * 30, "0/999", "a/b/c", "http://h/", "", "/", "é",
    "flask#1", "pallets/flask#1", "http://[::1", "http://h/runs/abc/v1", "/groups/" + "9" * 30,
]  # fmt: skip


def test_a_path_of_a_page_names_a_group() -> None:
    assert require_target_name("/groups/7") == "/groups/7"


@pytest.mark.parametrize("link", ["http://h/rollouts/1", "https://h/rollouts/1/turns/2", "http://h/groups/1"])
def test_a_link_to_a_number_changes_nothing(link: str) -> None:
    with pytest.raises(ConfigError, match="may be of another installation"):
        require_target_name(link)


@pytest.mark.parametrize("text", UNKNOWN)
async def test_a_name_of_nothing_is_refused(text: str, filled: FilledRun, database: Database) -> None:
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match="there is no run or rollout"):
            await require_named(connection, text, Kind.RUN, Kind.ROLLOUT)


async def test_an_evaluation_that_is_not_there_names_the_others(filled: FilledRun, database: Database) -> None:
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match="has no evaluation 'end'; it has start-greedy"):
            await require_named(connection, f"evaluate/{filled.run_id}/end", Kind.EVALUATION)


def test_each_kind_has_a_page() -> None:
    pages = {Named(kind, "r", 7, "name").page for kind in Kind}
    assert pages == {"/runs/r", "/runs/r/steps/7", "/groups/7", "/rollouts/7", "/tasks/7"}
