"""Why a request does not simply extend what was sampled before, and what kind of call it is.

Why here: causes are counted per run, decide what drift mode `drop` forgets, and tell a CLI that changed its habits from a bug of ours.
Called by: `prompts.py`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from adapter.conversation import MessageRun, RequestOptions
from adapter.turns.tree import AttachPoint, TurnTree
from ratchet.types import ForkCause, TurnKind

# How the pinned CLIs ask for a summary of the conversation, and for its title. A new version that words it otherwise shows as `edit`.
_SUMMARY = re.compile(
    r"create a detailed summary of (?:the|this|our) conversation|CONTEXT CHECKPOINT COMPACTION", re.IGNORECASE
)
_TITLE = re.compile(r"(?:generate|write|create) a (?:concise|short|succinct|brief)[^.\n]{0,60}\btitle\b", re.IGNORECASE)
_TELLING_LINE = 40  # characters: a line this long that comes back in a new opening was taken from the summary


def kind_of(wishes: RequestOptions, system: str, units: Sequence[MessageRun]) -> TurnKind:
    """Compaction and titles are known by what they ask for, sub-agents by their lane. What a tool returned asks for nothing."""
    last = units[-1].messages[-1]
    question = last.text if last.role == "user" else ""
    if _SUMMARY.search(question):
        return TurnKind.COMPACTION
    return TurnKind.AUXILIARY if _makes_titles(system) or _TITLE.search(question) else wishes.kind


@lru_cache(maxsize=64)
def _makes_titles(system: str) -> bool:
    """Remembered: searching a system prompt takes longer than most of a turn, and it is the same in all of them."""
    return _TITLE.search(system) is not None


def cause_of(
    tree: TurnTree,
    join: AttachPoint,
    prompt_tokens: int,
    lane: str,
    units: Sequence[MessageRun],
    keys: Sequence[bytes],
    dropped: bool,
    kind: TurnKind = TurnKind.MAIN,
) -> ForkCause | None:
    """None: the prompt extends a stored stream that ends as the template ends it, and nothing else does.

    `units` and `keys` as in `Reading`; `dropped`: the template took thinking out of sampled answers.
    """
    if lane and lane not in tree.last_answers:
        return ForkCause.SUB_AGENT
    parent = None if join.parent_turn_id is None else tree.nodes[join.parent_turn_id]
    if parent is not None and tree.ends_at(join):
        return None if parent.ended else ForkCause.STOP
    if kind is TurnKind.COMPACTION:
        return ForkCause.COMPACTION
    if parent is None:
        return _of_opening(tree, lane, units, ForkCause.ROOT)
    if join.kept_tokens == prompt_tokens:
        return ForkCause.RESTART
    return ForkCause.THINKING if dropped else _of_first_change(tree, join, prompt_tokens, lane, units, keys)


def _of_first_change(
    tree: TurnTree, join: AttachPoint, prompt_tokens: int, lane: str, units: Sequence[MessageRun], keys: Sequence[bytes]
) -> ForkCause:
    """An equal message with other tokens is drift, another message an edit."""
    for at, unit in enumerate(units):
        if keys[at + 1] in tree.seen:
            continue
        if unit.assistant:
            return ForkCause.DRIFT if tree.answers_like(keys[at], unit) else ForkCause.EDIT
        if at > 0:
            return ForkCause.EDIT
        alone = len(units) == 1 and 2 * join.kept_tokens <= prompt_tokens
        return _of_opening(tree, lane, units, ForkCause.ROOT if alone else ForkCause.EDIT)
    return ForkCause.DRIFT


def _of_opening(tree: TurnTree, lane: str, units: Sequence[MessageRun], otherwise: ForkCause) -> ForkCause:
    """A conversation that begins with what the last answer of its lane said goes on after a compaction."""
    kind, answer = tree.last_answers.get(lane, (None, ""))
    opening = "\n".join(message.text for message in units[0].messages)
    told = any(len(line) >= _TELLING_LINE and line in opening for line in map(str.strip, answer.splitlines()))
    return ForkCause.COMPACTION if told or kind is TurnKind.COMPACTION else otherwise
