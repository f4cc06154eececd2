"""Chains: every trainable token is trained exactly once, for forks at any place.

Promises 1 and 2 of the design depend on this pure function.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.turns.loss_mask import build_chains, is_trainable
from ratchet.types import ForkCause, TurnKind
from store.chains import TokenChain
from store.turns import TurnMeta


def turn(
    turn_id: int,
    parent: int | None,
    kept: int,
    suffix: int,
    sampled: int,
    cause: ForkCause | None = None,
    **changes: object,
) -> TurnMeta:
    values: dict[str, object] = {"kind": TurnKind.MAIN, "delivered": True, "logprobs_valid": True} | changes
    return TurnMeta(turn_id, parent, kept, suffix, sampled, fork_cause=cause, **values)  # type: ignore[arg-type]


def shape(chain: TokenChain) -> list[tuple[int, bool, bool, int, int]]:
    return [(span.turn_id, span.sampled, span.trained, span.start, span.length) for span in chain.spans]


def test_a_straight_conversation_is_one_chain() -> None:
    chains = build_chains([turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4)])
    assert [shape(chain) for chain in chains] == [
        [(1, False, False, 0, 10), (1, True, True, 10, 5), (2, False, False, 15, 3), (2, True, True, 18, 4)]
    ]
    assert chains[0].num_tokens == 22 and chains[0].num_trained == 9


def test_a_fork_behind_an_output_shares_it_and_trains_it_once() -> None:
    chains = build_chains([turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4), turn(3, 1, 15, 2, 6, ForkCause.EDIT)])
    assert [chain.leaf_turn_id for chain in chains] == [2, 3]
    assert shape(chains[1])[:2] == [(1, False, False, 0, 10), (1, True, False, 10, 5)]
    assert [chain.num_trained for chain in chains] == [9, 6]


def test_a_cut_output_is_context_in_the_new_branch() -> None:
    turns = [turn(1, None, 0, 10, 5), turn(2, 1, 12, 3, 4, ForkCause.DRIFT)]
    branch = build_chains(turns)
    assert [shape(chain) for chain in branch] == [
        [(1, False, False, 0, 10), (1, True, True, 10, 5)],
        [(1, False, False, 0, 10), (1, True, False, 10, 2), (2, False, False, 12, 3), (2, True, True, 15, 4)],
    ]
    drop = build_chains(turns, drift="drop")
    assert [shape(chain) for chain in drop] == [shape(branch[1])]


def test_drop_leaves_out_only_what_drifted() -> None:
    """A different message keeps its chain under `drop`, too; an output that another branch has whole stays trained."""
    edited = build_chains([turn(1, None, 0, 10, 5), turn(2, 1, 12, 3, 4, ForkCause.EDIT)], drift="drop")
    assert [chain.num_trained for chain in edited] == [5, 4]
    held = build_chains(
        [turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4, lane="helper"), turn(3, 1, 12, 3, 4, ForkCause.DRIFT)],
        drift="drop",
    )
    assert [chain.num_trained for chain in held] == [9, 4]


def test_an_answer_that_came_back_in_a_call_without_tokens_of_it_was_delivered() -> None:
    """The later call was not completed, or its template left the thinking out."""
    assert [
        chain.num_trained for chain in build_chains([turn(1, None, 0, 10, 5, delivered=False, came_back=True)])
    ] == [5]
    cut = [turn(1, None, 0, 10, 5, delivered=False, came_back=True), turn(2, 1, 10, 3, 4, ForkCause.THINKING)]
    assert [chain.num_trained for chain in build_chains(cut)] == [5, 4]


def test_an_answer_that_came_back_was_delivered() -> None:
    """A child that holds the whole output proves it, one that holds a part does not."""
    lost = turn(1, None, 0, 10, 5, delivered=False)
    assert [chain.num_trained for chain in build_chains([lost])] == [0]
    assert [chain.num_trained for chain in build_chains([lost, turn(2, 1, 15, 3, 4)])] == [9]
    assert [chain.num_trained for chain in build_chains([lost, turn(2, 1, 14, 3, 4)])] == [0, 4]
    # The child itself need not be trained: it was asked for with the answer in its prompt.
    child = turn(2, 1, 15, 3, 4, delivered=False)
    assert [chain.num_trained for chain in build_chains([lost, child])] == [5]
    # Without logprobs it stays context.
    broken = turn(1, None, 0, 10, 5, delivered=False, logprobs_valid=False)
    assert [chain.num_trained for chain in build_chains([broken, turn(2, 1, 15, 3, 4)])] == [4]


@pytest.mark.parametrize("cause", [ForkCause.DRIFT, ForkCause.THINKING])
def test_drift_over_skipped_turns(cause: ForkCause) -> None:
    """The cut is in an output two turns back: what followed it is left out under `drop`, and is a chain of its own
    under `branch`.
    """
    turns = [turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4), turn(3, 2, 22, 2, 6), turn(4, 1, 13, 9, 2, cause)]
    branch, drop = build_chains(turns), build_chains(turns, drift="drop")
    assert [chain.leaf_turn_id for chain in branch] == [3, 4] and [chain.num_trained for chain in branch] == [15, 2]
    cut = [(1, False, False, 0, 10), (1, True, False, 10, 3), (4, False, False, 13, 9), (4, True, True, 22, 2)]
    assert shape(branch[1]) == cut and [shape(chain) for chain in drop] == [cut]


def test_drop_loses_the_turns_that_the_drifted_prompt_continues_and_no_other_branch() -> None:
    """Turn 5 continues turn 4. Turns 3, of another branch, and 6, of another lane, keep their chains."""
    turns = [
        turn(1, None, 0, 10, 5),
        turn(6, 1, 15, 3, 4, ForkCause.SUB_AGENT, lane="helper"),
        turn(2, 1, 15, 3, 4, ForkCause.RESTART),
        turn(3, 2, 22, 2, 6),
        turn(4, 2, 22, 3, 7, ForkCause.EDIT),
        turn(5, 1, 13, 9, 2, ForkCause.DRIFT),
    ]
    drop = build_chains(turns, drift="drop")
    assert {chain.leaf_turn_id: chain.num_trained for chain in drop} == {6: 9, 3: 10, 5: 2}


def test_a_drift_of_the_prompt_loses_what_was_sampled_behind_it() -> None:
    """The tokens of the first question came back otherwise, so nothing that followed them is matched."""
    turns = [turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4), turn(3, 1, 6, 20, 2, ForkCause.DRIFT)]
    assert [(chain.leaf_turn_id, chain.num_trained) for chain in build_chains(turns, drift="drop")] == [(3, 2)]
    twice = [*turns, turn(4, 3, 28, 2, 3), turn(5, 3, 27, 4, 6, ForkCause.DRIFT)]
    assert [(chain.leaf_turn_id, chain.num_trained) for chain in build_chains(twice, drift="drop")] == [(5, 6)]


def test_matched_outputs_before_a_drift_stay_trained_under_drop() -> None:
    """Outputs that the new prompt has whole are trained in it; only the one that is cut is not."""
    turns = [turn(1, None, 0, 10, 5), turn(2, 1, 15, 3, 4), turn(3, 2, 20, 3, 6, ForkCause.DRIFT)]
    (chain,) = build_chains(turns, drift="drop")
    assert [(span.turn_id, span.trained, span.length) for span in chain.spans if span.sampled] == [
        (1, True, 5),
        (2, False, 2),
        (3, True, 6),
    ]
    assert [one.num_trained for one in build_chains(turns)] == [9, 6]


def test_an_output_whose_number_of_tokens_changed_is_not_trained_from_its_new_tokens() -> None:
    """The same text in more or fewer tokens is context: its new tokens were not sampled."""
    for num_retokenised in (2, 5, 9):
        turns = [turn(1, None, 0, 10, 5), turn(2, 1, 10, num_retokenised + 3, 4, ForkCause.DRIFT)]
        (chain,) = build_chains(turns, drift="drop")
        assert shape(chain) == [
            (1, False, False, 0, 10),
            (2, False, False, 10, num_retokenised + 3),
            (2, True, True, 13 + num_retokenised, 4),
        ]
        assert [one.num_trained for one in build_chains(turns)] == [5, 4]


def test_a_restart_from_the_prompts_base_keeps_both_conversations() -> None:
    """The history goes back to the first prompt: nothing drifted, so nothing is left out in either mode."""
    turns = [
        turn(1, None, 0, 10, 5),
        turn(2, 1, 15, 3, 4),
        turn(3, 1, 10, 0, 6, ForkCause.RESTART),
        turn(4, 3, 16, 2, 3),
    ]
    for drift in ("branch", "drop"):
        chains = build_chains(turns, drift=drift)  # type: ignore[arg-type]
        assert [chain.leaf_turn_id for chain in chains] == [2, 4] and [chain.num_trained for chain in chains] == [9, 9]


def test_a_prompt_that_restarts_inside_a_prompt() -> None:
    chains = build_chains([turn(1, None, 0, 10, 5), turn(2, 1, 7, 0, 4, ForkCause.RESTART)])
    assert shape(chains[1]) == [(1, False, False, 0, 7), (2, True, True, 7, 4)]


def test_turns_that_are_not_trainable_are_context() -> None:
    for change in ({"delivered": False}, {"logprobs_valid": False}, {"kind": TurnKind.AUXILIARY}):
        one = turn(1, None, 0, 10, 5, **change)
        assert not is_trainable(one)
        assert [chain.num_trained for chain in build_chains([one])] == [0]


@st.composite
def trees(draw: st.DrawFn) -> list[TurnMeta]:
    turns: list[TurnMeta] = []
    lengths: dict[int, int] = {}
    for turn_id in range(1, draw(st.integers(1, 12)) + 1):
        parent = draw(st.sampled_from([None, *lengths])) if lengths else None
        kept = 0 if parent is None else draw(st.sampled_from([lengths[parent], draw(st.integers(0, lengths[parent]))]))
        suffix, sampled = draw(st.integers(0 if kept else 1, 5)), draw(st.integers(0, 5))
        cause = (
            None
            if parent is None or kept == lengths[parent]
            else draw(st.sampled_from([ForkCause.DRIFT, ForkCause.THINKING, ForkCause.EDIT]))
        )
        turns.append(turn(turn_id, parent, kept, suffix, sampled, cause, delivered=draw(st.booleans())))
        lengths[turn_id] = kept + suffix + sampled
    return turns


def materialise(turns: list[TurnMeta]) -> dict[int, list[tuple[int, bool, int]]]:
    """An independent oracle: each stream as a list of (turn, sampled, position in the turn)."""
    streams: dict[int, list[tuple[int, bool, int]]] = {}
    for one in turns:
        kept = streams[one.parent_turn_id][: one.kept_tokens] if one.parent_turn_id else []
        own = [(one.id, False, at) for at in range(one.num_suffix)] + [
            (one.id, True, at) for at in range(one.num_sampled)
        ]
        streams[one.id] = kept + own
    return streams


def expand(chain: TokenChain) -> list[tuple[int, bool, int]]:
    return [(span.turn_id, span.sampled, span.source_start + at) for span in chain.spans for at in range(span.length)]


@given(trees())
def test_under_branch_every_trainable_token_is_trained_exactly_once(turns: list[TurnMeta]) -> None:
    chains = build_chains(turns)
    streams = materialise(turns)
    trained = [
        token for chain in chains for span in chain.spans if span.trained for token in expand(TokenChain(0, (span,)))
    ]
    came_back = {
        one.parent_turn_id
        for one in turns
        if one.parent_turn_id and one.kept_tokens == len(streams[one.parent_turn_id])
    }
    expected = {
        (one.id, True, at)
        for one in turns
        if one.num_sampled and (one.delivered or one.id in came_back)
        for at in range(one.num_sampled)
    }
    assert len(trained) == len(set(trained)) and set(trained) == expected
    for chain in chains:
        assert expand(chain) == streams[chain.leaf_turn_id]
        starts = [span.start for span in chain.spans]
        assert starts == [sum(span.length for span in chain.spans[:at]) for at in range(len(starts))]


@given(trees())
def test_under_drop_nothing_is_trained_twice_and_no_cut_output_is(turns: list[TurnMeta]) -> None:
    by_id = {one.id: one for one in turns}
    trained = [span for chain in build_chains(turns, drift="drop") for span in chain.spans if span.trained]
    assert len({span.turn_id for span in trained}) == len(trained)
    assert all(span.length == by_id[span.turn_id].num_sampled for span in trained)
