"""The engine sets that a stack serves: the one that is asked for and those with an open run, and no others."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from stack.parts import Stack
from stack.serving_plan import (
    ServingPlan,
    StackPlan,
    next_plan,
    plans_of,
    read_plan,
    require_adapter,
    wants_other,
    write_plan,
)
from store.open_runs import OpenSet


def plan_of(name: str, **values: Any) -> ServingPlan:
    config = RunConfig.model_validate({"datasets": [{"path": "x"}], "model": "/m", "engine_set": name, **values})
    return ServingPlan(config=config, model_path=Path(config.model))


A, B, C = (plan_of(name) for name in ("default", "b", "c"))


def open_run(plan: ServingPlan) -> OpenSet:
    config = plan.config.model_dump(mode="json")
    return OpenSet(plan.config.engine_set, f"run-of-{plan.config.engine_set}", "running", config)


def test_a_set_runs_while_it_is_asked_for_or_has_an_open_run() -> None:
    before = StackPlan(sets={"default": A, "b": B})
    for opened, expected in (([A, B], ["default", "b", "c"]), ([B], ["b", "c"]), ([], ["c"]), ([C], ["c"])):
        assert list(next_plan(before, C, plans_of(list(map(open_run, opened)))).sets) == expected
    assert list(next_plan(before, A, {}).sets) == ["default"]


def test_without_a_store_nothing_ends_and_nothing_that_waits_starts() -> None:
    before = StackPlan(sets={"default": A}, waiting={"b": B})
    assert next_plan(before, C, None) == StackPlan(sets={"default": A, "c": C}, waiting={"b": B})
    assert next_plan(before, B, None) == StackPlan(sets={"default": A, "b": B})
    assert next_plan(before, C, plans_of([open_run(B)])) == StackPlan(sets={"b": B, "c": C})


def test_a_set_whose_run_has_no_row_yet_is_not_dropped() -> None:
    """Its run reads its weights, so the store does not know the run."""
    asked = B.model_copy(update={"asked_at": 1000.0})
    before = StackPlan(sets={"b": asked, "c": C})
    assert next_plan(before, A, {}, now=1599.0) == StackPlan(sets={"b": asked, "default": A})
    assert next_plan(before, A, {}, now=1600.0) == StackPlan(sets={"default": A})
    assert next_plan(before, B, {}, now=1599.0).sets["b"].asked_at == 1000.0, "by a command that starts no run"
    again = B.model_copy(update={"asked_at": 1599.0})
    after = next_plan(before, again, {"c": C}, now=1599.0)
    assert after.sets["b"].asked_at == 1599.0 and after.without_times() == StackPlan(sets={"b": B, "c": C})


def test_the_engines_of_an_open_run_are_served_without_a_plan_of_before() -> None:
    """Its set was dropped while the run was stopped, or the file is gone; the run's config says what it needs."""
    assert next_plan(StackPlan(), A, plans_of([open_run(B)])) == StackPlan(sets={"b": B, "default": A})
    endpoint = plan_of("b", endpoint={"url": "http://e", "model": "m"}, training={"steps": 0})
    assert list(next_plan(StackPlan(), A, plans_of([open_run(endpoint)])).sets) == ["default"], "it needs no engine"


def test_a_run_that_is_resumed_gets_the_engines_of_its_config() -> None:
    """Its set has served another model while it was stopped."""
    before = StackPlan(sets={"default": A, "b": plan_of("b", model="/other")})
    assert next_plan(before, A, plans_of([open_run(B)])) == StackPlan(sets={"default": A, "b": B})
    assert next_plan(before, None, plans_of([open_run(B)])) == StackPlan(sets={"b": B}), "nothing is asked for"
    more = plan_of("b", engines=3)
    assert next_plan(StackPlan(sets={"b": more}), A, plans_of([open_run(B)])).sets["b"] == more


def test_an_equal_plan_keeps_its_gpus_and_its_place() -> None:
    kept = B.model_copy(update={"gpus": {"engine-b": (3,)}})
    before = StackPlan(sets={"b": kept, "default": A})
    opened = plans_of([open_run(A)])
    asked = plan_of("b", seed=7, training={"steps": 9})
    assert next_plan(before, asked, opened) == before, "the seed of another model than tiny changes no engine"
    moved = plan_of("b", engines=2).model_copy(update={"gpus": kept.gpus})
    assert next_plan(before, moved, opened) == StackPlan(sets={"b": moved, "default": A})


def test_a_run_that_shares_the_engines_starts_none_of_them_anew() -> None:
    def shared(rank: int, num_runs: int = 2, **values: Any) -> ServingPlan:
        training = {"training": {"lora": {"rank": rank}}, "engine": {"lora_runs": num_runs}}
        return plan_of("b", **training, **values)

    first, before = shared(5), StackPlan(sets={"b": shared(5)})
    opened = plans_of([open_run(first), open_run(shared(8, seed=3))])
    assert next_plan(before, shared(8, seed=3), opened) == before and not wants_other(before, shared(8, seed=3).config)
    for other in (shared(9), shared(5, 3), plan_of("b")):
        assert wants_other(before, other.config)


def test_a_stack_has_the_engines_of_its_file(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    assert stack.engine_names() == ["engine"]
    write_plan(stack, StackPlan(sets={"default": A, "b": B}))
    assert list(read_plan(stack).sets) == ["default", "b"] and stack.engine_names() == ["engine", "engine-b"]
    write_plan(stack, StackPlan(waiting={"default": A}))
    names = [part.name for part in stack.parts()]
    assert stack.engine_names() == [] and "adapter" not in names, "what it serves is not known yet"


def test_a_set_whose_template_cannot_be_used_is_refused_before_it_is_added(model: Path, tmp_path: Path) -> None:
    good, bad = B.model_copy(update={"model_path": model}), C.model_copy(update={"model_path": tmp_path})
    alone = StackPlan(sets={"default": A})
    require_adapter(StackPlan(), alone)  # the adapter's own start says so
    require_adapter(alone, StackPlan(sets={"default": A, "b": good}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        require_adapter(alone, StackPlan(sets={"default": A, "c": bad}))


def test_a_plan_with_a_key_that_this_version_lacks_is_read(tmp_path: Path) -> None:
    """As it is after an upgrade: the version before has written the plan."""
    stack = Stack(tmp_path)
    write_plan(stack, StackPlan(sets={"default": A}))
    text = stack.plan_path.read_text()
    stack.plan_path.write_text(text.replace('"training": {', '"training": {"gone": "disk",', 1))
    assert stack.plan_path.read_text() != text and read_plan(stack) == StackPlan(sets={"default": A})
