"""Classify prompts that do not simply extend a stored stream (`ForkCause`), and kinds of calls (`TurnKind`).

Causes are counted per run and decide what drift mode `drop` leaves out. A rise shows that a CLI has changed how it
builds its requests, or a bug of the adapter.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from adapter.conversation import MessageRun, RequestOptions
from adapter.turns.tree import AttachPoint, TurnTree
from ratchet.types import ForkCause, TurnKind

# The sentences with which the pinned CLIs ask for a summary of the conversation and for its title. If a new version
# changes them, its compactions are counted as `edit`.
_SUMMARY = re.compile(
    r"create a detailed summary of (?:the|this|our) conversation|CONTEXT CHECKPOINT COMPACTION"  # Claude Code, Codex
    r"|do not mention the summary process|produce the <state_snapshot>",  # OpenCode, Qwen Code
    re.IGNORECASE,
)
_TITLE = re.compile(r"(?:generate|write|create) a (?:concise|short|succinct|brief)[^.\n]{0,60}\btitle\b", re.IGNORECASE)
_QUOTED_LINE_CHARS = 40  # a line of at least this length that occurs in a new opening was copied from the summary


def kind_of(options: RequestOptions, system: str, runs: Sequence[MessageRun]) -> TurnKind:
    """Recognise compactions and titles by the user's last message or the system text, sub-agents by their lane.

    The text of a tool result is not looked at: a file may quote such a sentence.
    """
    last = runs[-1].messages[-1]
    question = last.text if last.role == "user" else ""
    if _SUMMARY.search(question):
        return TurnKind.COMPACTION
    return TurnKind.AUXILIARY if _asks_for_title(system) or _TITLE.search(question) else options.kind


@lru_cache(maxsize=64)
def _asks_for_title(system: str) -> bool:
    """Cached: searching a system text takes longer than most of a turn, and a session's turns share it."""
    return _TITLE.search(system) is not None


def cause_of(
    tree: TurnTree,
    attach_point: AttachPoint,
    prompt_tokens: int,
    lane: str,
    runs: Sequence[MessageRun],
    keys: Sequence[bytes],
    dropped: bool,
    kind: TurnKind = TurnKind.MAIN,
) -> ForkCause | None:
    """Return why the prompt does not simply extend a stored stream.

    None: it extends a whole stored stream that ends with the template's end token, no turn in `tree` does so already,
    and it is not a sub-agent's first. `runs` and `keys` as in `ParsedRequest`. `dropped`: the template left the
    thinking of a sampled answer out.
    """
    if lane and lane not in tree.last_answers:
        return ForkCause.SUB_AGENT
    parent = None if attach_point.parent_turn_id is None else tree.nodes[attach_point.parent_turn_id]
    if parent is not None and tree.is_free_end(attach_point):
        return None if parent.ended else ForkCause.STOP
    if kind is TurnKind.COMPACTION:
        return ForkCause.COMPACTION
    if parent is None:
        return _cause_of_opening(tree, lane, runs, ForkCause.ROOT)
    if attach_point.kept_tokens == prompt_tokens:
        return ForkCause.RESTART
    if dropped:
        return ForkCause.THINKING
    # The first new message: an equal message with other tokens is drift, a different message an edit.
    for at, run in enumerate(runs):
        if keys[at + 1] in tree.known_keys:
            continue
        if run.assistant:
            if tree.has_similar_answer(keys[at], run):
                return ForkCause.DRIFT
            return ForkCause.REASONING if tree.reasoning.knows(keys[at], run) else ForkCause.EDIT
        if at > 0:
            return _cause_behind_answer(tree, attach_point, lane, runs[at - 1], keys[at - 1])
        mostly_new = len(runs) == 1 and 2 * attach_point.kept_tokens <= prompt_tokens
        return _cause_of_opening(tree, lane, runs, ForkCause.ROOT if mostly_new else ForkCause.EDIT)
    return ForkCause.DRIFT


def _cause_behind_answer(
    tree: TurnTree, attach_point: AttachPoint, lane: str, answer: MessageRun, key: bytes
) -> ForkCause:
    """The first new message follows a known answer: if the prompt leaves its stream before that, the same messages have
    other tokens."""
    turn_id = tree.turn_of_answer(key, answer, lane) if answer.assistant else None
    if turn_id is not None and attach_point.kept_tokens < tree.nodes[turn_id].length:
        return ForkCause.DRIFT
    return ForkCause.EDIT


def _cause_of_opening(tree: TurnTree, lane: str, runs: Sequence[MessageRun], otherwise: ForkCause) -> ForkCause:
    """Recognise a compaction: the opening quotes the last answer of the lane, or follows the answer of a compaction."""
    kind, answer = tree.last_answers.get(lane, (None, ""))
    opening = "\n".join(message.text for message in runs[0].messages)
    quotes = any(len(line) >= _QUOTED_LINE_CHARS and line in opening for line in map(str.strip, answer.splitlines()))
    return ForkCause.COMPACTION if quotes or kind is TurnKind.COMPACTION else otherwise
