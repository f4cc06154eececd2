"""The label of an engine: versions by slot, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.lora_slots import (
    SERVED_RANKS,
    label_of_versions,
    label_with,
    served_rank,
    slot_name,
    version_in_label,
    versions_of_label,
)
from ratchet.types import MODEL_NAME, policy_version

VERSIONS = st.builds(policy_version, st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True), st.integers(0), st.integers(0))
SLOTS = st.integers(1, 9)


def test_an_engine_of_one_run_has_that_runs_version_as_its_label() -> None:
    assert label_of_versions({1: "run-1/2.e1"}) == "run-1/2.e1" == label_with(None, 1, "run-1/2.e1")
    assert versions_of_label("run-1/2.e1") == {1: "run-1/2.e1"} and versions_of_label(None) == {}
    assert label_of_versions({}) is None and version_in_label(None, 1) is None
    assert slot_name(1) == MODEL_NAME


def test_a_slot_without_a_version_keeps_its_place() -> None:
    assert label_of_versions({3: "c/1.e1", 1: "a/1.e1"}) == "a/1.e1;;c/1.e1"
    assert label_with("a/1.e1;;c/1.e1", 2, "b/0.e0") == "a/1.e1;b/0.e0;c/1.e1"
    assert label_with(None, 2, "b/0.e0") == ";b/0.e0" and version_in_label(";b/0.e0", 1) is None


@given(st.dictionaries(SLOTS, VERSIONS), SLOTS, VERSIONS)
def test_an_update_of_a_slot_changes_no_other(versions: dict[int, str], slot: int, version: str) -> None:
    label = label_of_versions(versions)
    assert versions_of_label(label) == versions
    assert versions_of_label(label_with(label, slot, version)) == versions | {slot: version}


def test_slots_have_names_of_their_own() -> None:
    assert len({slot_name(slot) for slot in range(1, 40)}) == 39


@pytest.mark.parametrize(("rank", "served"), [(1, 8), (8, 8), (9, 16), (512, 512)])
def test_the_served_rank_is_one_of_vllms(rank: int, served: int) -> None:
    assert served_rank(rank) == served and served in SERVED_RANKS
