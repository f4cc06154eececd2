"""Explain a rollout's reward in at most five sentences with links: verdict, tests, agent, checks, use in training.

Each sentence is made from stored facts only. The viewer and `ratchet explain` show them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ratchet.durations import duration_in_words
from ratchet.types import CHAT, TRUNCATED_EXITS, AgentExit, GroupState, JsonObject, Outcome
from reads.rollouts import GradeView, GroupRewards, RolloutFacts, RolloutHead

_MAX_NAMES = 3
_ENDED: dict[str, str] = {GroupState.CANCELLED: "been cancelled", GroupState.FAILED: "failed for want of verdicts"}
EXITS = {
    AgentExit.DONE: "ended by itself",
    AgentExit.TURN_LIMIT: "was ended by its limit of model calls",
    AgentExit.CONTEXT_FULL: "ended because its context was full or an answer was cut at its token limit",
    AgentExit.TIME_BUDGET: "ran out of time",
    AgentExit.CRASHED: "crashed",
    AgentExit.STARVED: "made no model call, or could not reach its model,",
}


@dataclass(slots=True, frozen=True)
class WhySentence:
    """One sentence. `link`: the page or the part of the page with the evidence, empty without one."""

    text: str
    link: str = ""


def explain_reward(facts: RolloutFacts) -> list[WhySentence]:
    grade = next((one for one in facts.grades if one.id == facts.rollout.grade_id), None)
    sentences = [
        _verdict(facts.rollout, grade),
        _tests(facts.rollout, grade),
        _agent(facts),
        _checks(facts.rollout, grade),
        _training(facts),
    ]
    return [one for one in sentences if one is not None]


def _verdict(head: RolloutHead, grade: GradeView | None) -> WhySentence:
    if head.outcome is None:
        return WhySentence("It has no reward yet, because it still runs.", f"/rollouts/{head.id}#timeline")
    if head.outcome == Outcome.CANCELLED:
        return WhySentence(f"It has no reward, because it was cancelled{_because(head.outcome_reason)}.")
    lost = f"{_because(head.outcome_reason)}; this is not a zero."
    if head.outcome == Outcome.INFRA_FAILED:
        text = f"It has no reward, because the infrastructure failed{lost}"
        return WhySentence(text, f"/rollouts/{head.id}#attempts")
    if head.outcome == Outcome.GRADER_FAILED or grade is None:
        text = f"It has no reward, because no grader gave a verdict{lost}"
        text = text if head.reward is None else f"Its reward is {head.reward:g}."
        return WhySentence(text, f"/rollouts/{head.id}#grades")
    verdict = (
        "judged the patch as solving the task" if grade.solved else "judged that the patch does not solve the task"
    )
    if grade.rejected:
        verdict = f"rejected the patch by the rule {grade.rule or 'unknown'}"
    text = f"Its reward is {head.reward:g}, because the grader {grade.grader} ({grade.grader_version}) {verdict}"
    return WhySentence(text + _because(grade.reason) + ".", f"/rollouts/{head.id}#grade-{grade.id}")


def _tests(head: RolloutHead, grade: GradeView | None) -> WhySentence | None:
    if grade is None:
        return None
    link = f"/rollouts/{head.id}#tests"
    parts = []
    for name, pair in (("that must newly pass", grade.fail_to_pass), ("that must still pass", grade.pass_to_pass)):
        if pair and pair[1]:
            parts.append(f"{pair[0]} of {pair[1]} tests {name} did")
    failed = [name for name, outcome in grade.tests.items() if outcome not in ("passed", "PASSED", "skipped")]
    if failed:
        more = f" and {len(failed) - _MAX_NAMES} more" if len(failed) > _MAX_NAMES else ""
        parts.append(f"not passed: {', '.join(sorted(failed)[:_MAX_NAMES])}{more}")
    elif grade.tests and not parts:
        number = len(grade.tests)
        parts.append("the only reported test passed" if number == 1 else f"all {number} reported tests passed")
    return WhySentence(_capital("; ".join(parts)) + ".", link) if parts else None


def _agent(facts: RolloutFacts) -> WhySentence | None:
    head = facts.rollout
    newest = facts.attempts[-1] if facts.attempts else None
    leaving = head.agent_exit or (newest.agent_exit if newest else None)
    if leaving is None:
        return None
    words = EXITS.get(AgentExit(leaving), leaving) if leaving in list(AgentExit) else leaving
    text = f"The agent {words}"
    if head.outcome is not None:
        text += f" after {head.num_turns} model {'call' if head.num_turns == 1 else 'calls'}"
    if newest is not None and newest.used_seconds:
        text += f" {'after' if head.outcome is None else 'and'} {duration_in_words(newest.used_seconds)}"
    if len(facts.attempts) > 1:
        text += f" in attempt {newest.n if newest else len(facts.attempts)}"
    if newest is not None and newest.num_replayed:
        fork = f"rollout {head.forked_from or 'of an archive'}"
        source = "the attempt before" if head.forked_turn_id is None else fork
        text += f", which replayed {newest.num_replayed} of them from {source}"
    patch = facts.patch
    if patch is None:
        text += ", and left no patch"
    elif patch.reason and not patch.num_bytes:
        text += f", and {patch.reason}"
    elif not patch.num_bytes:
        text += ", and its patch is empty" + (f": {facts.why_empty}" if facts.why_empty else "")
    else:
        text += f", and its patch changes {patch.num_files} {'file' if patch.num_files == 1 else 'files'}"
        text += f" ({patch.num_bytes} bytes)"
    return WhySentence(text + ".", f"/rollouts/{head.id}#patch")


def _checks(head: RolloutHead, grade: GradeView | None) -> WhySentence | None:
    """Say what control runs found, what was flagged and which files were left out."""
    if grade is None:
        return None
    parts = [*control_words(grade.control or [])]
    if grade.flags:
        flags = ", ".join(f"{one.get('what')} ({one.get('place')})" for one in grade.flags[:_MAX_NAMES])
        parts.append(f"flagged: {flags}")
    if grade.findings:
        named = ", ".join(f"{one.get('path')} by {one.get('rule')}" for one in grade.findings[:_MAX_NAMES])
        parts.append(f"integrity rules left out {len(grade.findings)} changed files: {named}")
    if grade.solved and not grade.has_oracle:
        parts.append("the run was not compared with gold runs, because the task is not admitted")
    return WhySentence(_capital("; ".join(parts)) + ".", f"/rollouts/{head.id}#grade-{grade.id}") if parts else None


def control_words(runs: Sequence[JsonObject]) -> list[str]:
    words: Counter[str] = Counter()
    for run in runs:
        if run.get("solved") is not None:
            words["a second run with the true tests " + ("confirmed it" if run["solved"] else "failed")] += 1
        elif run.get("passed"):
            words[f"in a control run {len(run['passed'])} tests passed that must fail"] += 1
        else:
            words[f"in a control run {run.get('failed', 0)} tests failed as they must"] += 1
    return [one + f" ({number} times)" * (number > 1) for one, number in words.items()]


def _training(facts: RolloutFacts) -> WhySentence | None:
    head = facts.rollout
    group = facts.group
    if head.purpose == "eval":
        what = "belongs to an evaluation" if group is not None else "was started by hand"
        what = "is a chat with a person" if head.harness == CHAT else what
        return WhySentence(f"It {what}, so nothing is trained on it.")
    if head.replaced_by is not None:
        return WhySentence("It was replaced by another rollout, so it enters no step.", f"/rollouts/{head.replaced_by}")
    if group is None or head.group_id is None or head.outcome is None:
        return None
    link = f"/groups/{head.group_id}"
    spread = _spread(group)
    if head.late:
        return WhySentence("It ended after its group did, so it enters no step.", link)
    if facts.use is not None:
        text = f"{spread}, so its advantage in step {facts.use.step} is {facts.use.advantage:+.3g}"
        text += f", on {facts.use.num_tokens} trained tokens{_why_untrained(facts)}"
        text += f"; its reward was {facts.use.reward:g} then" if facts.use.reward != head.reward else ""
        step = f"/runs/{quote(head.run_id)}/steps/{facts.use.step}"
        return WhySentence(text + ".", f"{step}?rollout={head.id}#rollout-{head.id}")
    if group.use == "no_signal":
        return WhySentence(f"{spread}, so the group has no signal and step {group.step} left it out.", link)
    if group.use == "expired":
        return WhySentence(f"{spread}; step {group.step} left the group out, because its tokens are too old.", link)
    if group.use == "trained":
        return WhySentence(f"{spread}; step {group.step} used the group, but no token of this rollout.", link)
    if group.discarded:
        return WhySentence(f"{spread}; {group.discarded.rstrip('.')}.", link)
    if group.state in (GroupState.CANCELLED, GroupState.FAILED):
        return WhySentence(f"{spread}; the group has {_ENDED[group.state]}, so no step uses it.", link)
    waiting = f"; {group.num_open} members still run" if group.num_open else ""
    return WhySentence(f"{spread}{waiting}; no step has used the group yet.", link)


def _why_untrained(facts: RolloutFacts) -> str:
    """Return by which key of the config no token of a rollout of a trained group is trained; empty if none says so."""
    use, group, rules = facts.use, facts.group, facts.rules
    if use is None or use.num_tokens or group is None or not group.rewards or rules is None:
        return ""
    is_above = use.reward > sum(group.rewards) / len(group.rewards)
    if not is_above and rules.negative_weight == 0:
        return ": the config's training.negative_weight is 0, so only rewards above the mean are trained"
    if not is_above and rules.loss_preset == "sft":
        return ": the config's loss.preset is sft, so only rewards above the mean are trained"
    if rules.truncated == "mask" and facts.rollout.agent_exit in TRUNCATED_EXITS:
        return ": the config's training.truncated is mask, so agents that a limit ended are not trained"
    return ""


def _spread(group: GroupRewards) -> str:
    number = len(group.rewards)
    if not number:
        return "No member of its group has a reward"
    mean = sum(group.rewards) / number
    if max(group.rewards) == min(group.rewards):
        return f"All {number} rewarded members of its group have the reward {mean:g}"
    return f"The {number} rewarded members of its group have the mean reward {mean:.3g}"


def _because(reason: str) -> str:
    line = " ".join(reason.split())
    if not line:
        return ""
    return ": " + (line if len(line) <= 160 else line[:159] + "…").rstrip(".")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
