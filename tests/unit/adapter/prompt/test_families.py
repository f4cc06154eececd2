"""Exact prompts with the templates and the tokenizers' kinds of the families that people train.

Whether a turn is rendered in parts or in full, each prompt begins with what was sampled, as sampled.
"""

from pathlib import Path

import numpy as np
import pytest

from adapter.conversation import Message, ToolCall
from adapter.turns.loss_mask import Drift, build_chains
from ratchet.types import ForkCause, TurnKind
from store.turns import TurnMeta
from tests.standins.family_tokenizers import KINDS, Kind, ids_of_letters
from tests.unit.adapter.client import WireMessage
from tests.unit.adapter.families import FAMILIES, OWN_TEMPLATES, Agent, Family, Models, make_renderer

EACH = pytest.mark.parametrize("name", list(FAMILIES))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


async def check_prompt(agent: Agent, parent: int, cause: ForkCause | None) -> None:
    """Ask, and check that the prompt is the stream of turn `parent` and the end of the whole text.

    If the text before the answer has changed, it is the whole text: no answer was sampled as it is shown.
    """
    prepared = await agent.ask()
    assert prepared.fork_cause is cause, prepared.fork_cause
    full = agent.full()
    if cause in (ForkCause.THINKING, ForkCause.DRIFT):
        assert np.array_equal(prepared.ids, full)
    else:
        stream = agent.session.tree.stream(parent) if parent else np.zeros(0, np.int32)
        assert np.array_equal(prepared.ids[: len(stream)], stream)
        tail = prepared.ids[len(stream) :]
        assert 0 < len(tail) <= len(full) and np.array_equal(tail, full[len(full) - len(tail) :])
        assert not parent or f"follow{parent}" in agent.renderer.tokenizer.decode(tail)
    agent.sample(prepared)


def cause_after(number: int, family: Family, thinks: bool = False) -> ForkCause | None:
    """Return the cause of the turn after answer `number`, of which every third is a text that a question follows."""
    if number == 0:
        return ForkCause.ROOT
    if family.has_tools and number % 3:
        return None
    if family.moves_tools:
        return ForkCause.DRIFT
    return ForkCause.THINKING if family.drops_thinking and (thinks or family.marks_all) else None


def test_the_table_names_all_kinds_of_tokenizers_and_all_own_templates() -> None:
    assert {one.tokenizer for one in FAMILIES.values()} == set(KINDS)
    own = {path.stem for path in OWN_TEMPLATES.iterdir()}
    assert own <= set(FAMILIES) and all(
        "not the model's own file" in path.read_text() for path in OWN_TEMPLATES.iterdir()
    )


@EACH
def test_which_path_a_family_has(models: Models, name: str) -> None:
    renderer, family = models[name], FAMILIES[name]
    assert (renderer.full_render_reason is None) == family.in_parts, renderer.full_render_reason
    if renderer.segments is not None:
        assert renderer.segments.drops_thinking == family.drops_thinking


@EACH
def test_letters_mean_their_text(models: Models, name: str) -> None:
    """The ids that the client samples are not those of the text, and decode to it."""
    tokenizer = models[name].tokenizer
    text = "answer 12 é 日本 \n def f(x):"
    ids = ids_of_letters(tokenizer.plain, text)
    assert tokenizer.decode(ids) == text and not np.array_equal(ids, tokenizer.encode_whole(text))


@EACH
@pytest.mark.parametrize("seed", range(5))
async def test_prompts_begin_with_what_was_sampled(models: Models, name: str, seed: int) -> None:
    """Each prompt is the stored stream and the end of the full text; no turn forks. Texts contain control tokens."""
    agent = Agent(models[name], name, seed)
    for number in range(8):
        await check_prompt(agent, number, cause_after(number, FAMILIES[name]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
async def test_every_kind_of_tokenizer_with_one_template_of_each_path(tmp_path: Path, name: str, kind: Kind) -> None:
    agent = Agent(make_renderer(tmp_path, name, kind), name, seed=6)
    assert (agent.renderer.full_render_reason is None) == FAMILIES[name].in_parts
    for number in range(8):
        await check_prompt(agent, number, cause_after(number, FAMILIES[name]))


def test_a_long_text_is_cached_for_the_start_and_for_behind_a_token(tmp_path: Path) -> None:
    tokenizer = make_renderer(tmp_path, "qwen3_coder", "metaspace").tokenizer
    long = "word " * 400
    for _ in range(2):
        at_start, behind = tokenizer.encode(long), tokenizer.encode(long, at_start=False)
        assert np.array_equal(at_start, tokenizer.encode_whole(long)) and not np.array_equal(at_start, behind)
        token = tokenizer.alias["<|im_end|>"]
        assert np.array_equal(behind, tokenizer.encode_whole(token + long)[1:])


@EACH
async def test_thinking_stays_until_a_new_question(models: Models, name: str) -> None:
    """Results of tools keep thinking in the stream. After a question, a template that drops it gives another text."""
    agent = Agent(models[name], name, seed=1)
    agent.reasoning = "a thought"
    for number in range(8):
        await check_prompt(agent, number, cause_after(number, FAMILIES[name], thinks=True))


def test_calls_that_a_template_names_by_id_are_counted_over_the_conversation(models: Models) -> None:
    """As Kimi K2 was trained; agents send ids of their own, and the same id may come again."""
    history = [Message("user", "q")]
    for ids in (("toolu_a", "toolu_b"), ("toolu_a",)):
        calls = tuple(ToolCall(one, name, {"x": 1}) for one, name in zip(ids, ("bash", "read"), strict=False))
        history += [Message("assistant", "", tool_calls=calls)]
        history += [Message("tool", f"result {one}", tool_call_id=one) for one in ids]
    text = models["kimi_k2"].tokenizer.added.sub("|", models["kimi_k2"].template.render(history))
    assert "toolu" not in text.replace("result toolu", "")
    for part in ("functions.bash:0|{", "functions.read:1|{", "functions.bash:2|{"):
        assert part in text, text
    assert "Return of functions.bash:0\nresult toolu_a" in text and "Return of functions.bash:2\nresult toolu_a" in text
    assert "functions.bash" not in models["qwen3_coder"].template.render(history)


@EACH
async def test_a_sub_agent_and_the_main_agent_have_a_stream_each(models: Models, name: str) -> None:
    main, sub = Agent(models[name], name, seed=2), Agent(models[name], name, seed=3)
    sub.session = main.session
    sub.builder = main.builder
    sub.lane = "sub"
    await check_prompt(main, 0, ForkCause.ROOT)
    sub.number = 99  # answers 100 and 101 call a tool
    prepared = await sub.ask()
    assert prepared.fork_cause is ForkCause.SUB_AGENT and prepared.kind is TurnKind.SUB_AGENT
    assert np.array_equal(prepared.ids, sub.full())
    sub.sample(prepared)
    for turn in (1, 2):
        await check_prompt(main, turn, None)
        await check_prompt(sub, 99 + turn, None)


@EACH
async def test_a_compacted_history_is_a_new_text(models: Models, name: str) -> None:
    agent = Agent(models[name], name, seed=4)
    for number in range(3):
        await check_prompt(agent, number, None if number else ForkCause.ROOT)
    agent.history = [WireMessage("user", (Message("user", "This session is being continued: a summary"),))]
    prepared = await agent.ask()
    assert prepared.fork_cause in (ForkCause.ROOT, ForkCause.COMPACTION, ForkCause.EDIT)
    assert np.array_equal(prepared.ids, agent.full())
    agent.sample(prepared)
    await check_prompt(agent, 4, None)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.drops_thinking])
@pytest.mark.parametrize("calls_tools", [True, False])
async def test_what_each_drift_rule_trains_of_dropped_thinking(models: Models, name: str, calls_tools: bool) -> None:
    """`branch` trains all answers once. `drop` leaves out all answers behind the first one whose thinking a question
    removes."""
    agent = Agent(models[name], name, seed=5)
    agent.reasoning = "a thought"
    turns: list[TurnMeta] = []
    for number in range(1, 10):
        prepared = await agent.ask()
        agent.sample(prepared, text=None if calls_tools else "done")
        point, num_sampled = prepared.attach_point, len(agent.session.tree.sampled(number))
        sizes = (point.parent_turn_id, point.kept_tokens, len(prepared.suffix), num_sampled)
        cause = prepared.fork_cause
        turns.append(TurnMeta(number, *sizes, prepared.kind, cause, delivered=True, logprobs_valid=True))

    def trained(drift: Drift) -> dict[int, int]:
        spans = [span for chain in build_chains(turns, drift) for span in chain.spans if span.trained]
        return {turn.id: sum(span.length for span in spans if span.turn_id == turn.id) for turn in turns}

    assert trained("branch") == {turn.id: turn.num_sampled for turn in turns}
    after_drops = {turn.id for turn in turns if turn.fork_cause is ForkCause.THINKING}
    # Version 1 of Gemma 4's template shows no thinking of an answer without calls, so nothing changes there.
    assert len(after_drops) == (2 if calls_tools else 0 if name == "gemma4" else 8)
    ends = {turn.id: turn.kept_tokens + turn.num_suffix + turn.num_sampled for turn in turns}
    kept = {turn.id: turn.kept_tokens for turn in turns}
    left_out = {one for after in after_drops for one in range(1, after) if ends[one] > kept[after]}
    assert left_out >= {after - 1 for after in after_drops}
    assert trained("drop") == {turn.id: 0 if turn.id in left_out else turn.num_sampled for turn in turns}
