"""`ratchet watch ROLLOUT`: the conversation of one rollout while its agent works."""

import time
from typing import TYPE_CHECKING

from ratchet.durations import duration_in_words
from ratchet.types import TurnState

if TYPE_CHECKING:
    from reads.conversation import TurnView
    from reads.turns import TurnContent

_LOOK_SECONDS = 1.0
_TURNS_PER_LOOK = 50
_SHORT_LINES = 12
_WIDTH = 79


def follow_rollout(rollout_id: int, once: bool, whole: bool) -> None:
    """Print a rollout's turns as they end, until the rollout has ended; with `once`, those that have ended."""
    from sqlalchemy.ext.asyncio import AsyncConnection

    from client import Client
    from reads.rollouts import RolloutHead, read_rollout_head
    from reads.turns import read_turn_contents

    turns = TurnPrinter(None if whole else _SHORT_LINES)

    async def look(connection: AsyncConnection) -> tuple[RolloutHead | None, list["TurnContent"]]:
        # The outcome is read before the turns, so that the last turns of an ended rollout are among them.
        head = await read_rollout_head(connection, rollout_id)
        limit = _TURNS_PER_LOOK + turns.num_ahead
        return head, await read_turn_contents(connection, rollout_id, limit, turns.after)

    while True:
        head, found = Client().read(look)
        assert head is not None
        for line in turns.lines_of(found, is_last=head.outcome is not None):
            print(line, flush=True)
        if len(found) >= _TURNS_PER_LOOK and turns.after == found[-1].id:
            continue
        if head.outcome is not None or once:
            reward = "no reward" if head.reward is None else f"reward {head.reward:g}"
            print(f"{head.outcome or 'still open'}, {reward}: `ratchet explain {rollout_id}` says why")
            return
        time.sleep(_LOOK_SECONDS)


class TurnPrinter:
    """Turns rows into lines, each ended turn once. `after`: every turn up to this id has been printed."""

    def __init__(self, max_lines: int | None) -> None:
        self.max_lines = max_lines
        self.after = 0
        self._number = 0
        self._printed: set[int] = set()
        self._announced: set[int] = set()

    @property
    def num_ahead(self) -> int:
        """The number of turns after `after` that were printed or announced; they follow a call that has not ended."""
        return len(self._printed | self._announced)

    def lines_of(self, turns: list["TurnContent"], is_last: bool = False) -> list[str]:
        """Return the lines of turns that have ended since the last call, and of calls that have begun.

        `is_last`: no turn ends any more, so those without an answer are printed, too.
        """
        from reads.conversation import read_conversation

        lines: list[str] = []
        is_gapless = True
        for turn in turns:
            if turn.state == TurnState.IN_FLIGHT and not is_last:
                is_gapless = False
                if turn.id not in self._announced:
                    self._announced.add(turn.id)
                    lines.append(f"… the policy answers a prompt of {turn.prompt_tokens:,} tokens")
                continue
            if turn.id not in self._printed:
                self._number += 1
                self._printed.add(turn.id)
                for view in read_conversation([turn], self._number):
                    lines += self._turn(view)
            if is_gapless:
                self.after = turn.id
                self._printed.discard(turn.id)
                self._announced.discard(turn.id)
        return lines

    def _turn(self, turn: "TurnView") -> list[str]:
        seconds = "" if turn.seconds is None else f", {duration_in_words(turn.seconds)}"
        cause = f", {turn.fork_cause}" if turn.fork_cause else ""
        head = f"── turn {turn.number} (id {turn.id}, lane {turn.lane or 'main'}{cause}): "
        head += f"{turn.prompt_tokens:,} → {turn.num_sampled:,} tokens{seconds}"
        lines = [head]
        for message in turn.messages:
            if message.role != "assistant":  # a history that is sent again was printed when it was new
                lines += self._block(message.role, message.text)
        if turn.answer is None:
            return [*lines, f"(no answer: the call was {turn.state})"]
        lines += self._block("thinks", turn.answer.reasoning) + self._block("policy", turn.answer.text)
        for use in turn.answer.tool_uses:
            lines += self._block(f"calls {use.name}", use.body or use.title)
        return lines

    def _block(self, who: str, text: str) -> list[str]:
        """Return the text with its author, indented; long texts are cut unless `max_lines` is None."""
        rows = text.strip().splitlines()
        if not rows:
            return []
        shown = rows if self.max_lines is None else [row[:_WIDTH] for row in rows[: self.max_lines]]
        more = len(rows) - len(shown)
        return [f"{who}:", *(f"  {row}" for row in shown), *([f"  … {more} more lines (--whole)"] if more else [])]
