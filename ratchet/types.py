"""The words of the system, its states and their transitions.

Every part uses them. The glossary (`make docs`) is made from the list below (`word: sentence.`) and from the enums.

task: one row of a dataset, with an image, a repository, a problem statement and a grader.
rollout: one try of one agent at one task under one policy; one workflow. Its purpose is `train` or `eval`.
group: the `group_size` rollouts of one task whose rewards are compared with each other.
member: one rollout of a group, numbered from 0; a replacement gets the next number.
attempt: the n-th agent box of a rollout, counted by the workflow from 1 and used in keys.
try: Temporal's retry of one activity; never part of a key.
stage: one activity of a workflow with its timeouts and retries (`temporal.yaml`), such as boot, agent or grade.
session: the adapter's record of one attempt; its bearer tokens are valid until it is closed.
turn: one model call of a rollout, with its exact prompt ids, sampled ids, logprobs and policy versions.
lane: the turns of one conversation of an agent program: the main one, or one of a sub-agent.
fork: a turn that does not simply extend a stored token stream which no other turn extends; its cause is recorded.
drift: a message that comes back unchanged but is tokenised differently from the ids that were sampled.
chain: one root-to-leaf path of a rollout's turn tree as one token sequence with a loss mask.
span: a contiguous piece of a chain that comes from one turn, either sampled or context.
harness: the code that installs, configures, starts and polls one agent program in a box.
box: a sandbox, made by E2B, a service with E2B's API, or Docker; each box is used by one stage or one attempt.
patch: the agent's diff against the base commit that was recorded before the agent started.
grader: the code that turns a patch into a verdict by running hidden tests in a fresh box.
verdict: a grader's judgement of one patch: solved, not solved or rejected, with its evidence.
reward: the number that the run's reward function computes from a verdict and the facts of the rollout.
admission: the check that a task's gold patch always passes and its empty patch never does.
guard: the longest time in seconds for which one rollout may have boxes, outages and waits for us not counted.
run: one training or evaluation run, with a config, policy versions and steps.
step: one batch of groups trained by the learner; it ends with published weights.
policy version: published weights, named `<run_id>/<step>.e<epoch>`; step 0 is the initial weights.
epoch: the number of a learner within a run; a later learner has a higher one, and writes of earlier ones fail.
staleness: the number of steps by which the weights that sampled a token are older than the step that trains on it.
dialect: a wire protocol that agents speak: Anthropic Messages, OpenAI Chat Completions or OpenAI Responses.
adapter: the HTTP service that agents call as their model; it records every turn.
lora: low-rank matrices that `training.lora` trains instead of the weights; peft calls them adapters.
learner: the Ray training side, which reads plan rows from Postgres and publishes weights.
engine: one vLLM server and its wrapper process.
engine set: the engines that answer one run at a time and load its weights; a config names that of its run.
lease: a claim in Postgres that expires by the database's clock unless it is renewed.
fence: a number that increases with every try of a stage; writes that carry an older number match no row.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

JsonObject = dict[str, Any]
"""A JSON object at an edge: a JSON column, the body of a message, a report for people or a task's metadata."""

MODEL_NAME = "policy"
"""The model name under which engines serve the policy and under which agents request it."""

CHAT = "activities.chat:hold_session"
"""The generate function of a chat, which is also the harness of its rollout."""


class Purpose(StrEnum):
    """The purpose of a rollout, a group or a task of a run; fixed when the row is created."""

    TRAIN = "train"
    """The rollout is sampled at the training temperature and its group may enter a step."""
    EVAL = "eval"
    """The rollout belongs to an evaluation, or was started by hand; it is never trained on."""


class RunState(StrEnum):
    """State of a run.

    running → paused (`ratchet pause`, TrainRun, planner, learner or sweep), running or paused → done | stopped |
    cancelled (TrainRun), paused, stopped, failed or cancelled → running (`ratchet resume` and `ratchet set
    --add-steps`, and `ratchet train` for a paused one), done → running (`ratchet set --add-steps`), any ended one →
    running (`ratchet retry evaluate/RUN/LABEL`, which drains it: it ends after that evaluation), running → failed (the
    learner of a run that trains on stored rollouts).
    """

    RUNNING = "running"
    """Groups are started, planned and trained."""
    PAUSED = "paused"
    """No group, step or evaluation is started, for the reason in `state_reason`, until the run is resumed; rollouts in
    flight go on."""
    DONE = "done"
    """The last step is trained and its checkpoint is committed. Final unless steps are added."""
    STOPPED = "stopped"
    """The run ended before its last step because a person stopped or drained it. Its trained steps are in a checkpoint,
    unless it was paused at that time; it can be resumed."""
    FAILED = "failed"
    """The run stopped with an error, which is in `state_reason`; it can be resumed from its newest checkpoint."""
    CANCELLED = "cancelled"
    """The run was cancelled before its last step; it can be resumed from its newest checkpoint."""


OPEN_STATES = (RunState.RUNNING, RunState.PAUSED)
"""States of a run that has not ended."""


class GroupState(StrEnum):
    """State of a group.

    open → ready | failed (when all members have ended), ready → consumed (planner), open or ready → cancelled,
    failed → ready (regrading with `--adopt`), failed → open (`ratchet retry`), consumed → cancelled (`ratchet
    resume --skip-step`, before the step is trained).
    """

    OPEN = "open"
    """Members still run, or may still be replaced."""
    READY = "ready"
    """At least `min_graded` members have a reward; the planner may take the group."""
    CONSUMED = "consumed"
    """A step has used the group, as trained or as left out (no signal, too old)."""
    FAILED = "failed"
    """All members have ended and fewer than `min_graded` have a reward."""
    CANCELLED = "cancelled"
    """The group was cancelled and will not be trained on. Final."""


class GroupProgress(StrEnum):
    """The progress of a group, as lists of groups name it: its state, or what the step that consumed it did."""

    OPEN = "open"
    """In flight: members still run, or may still be replaced."""
    READY = "ready"
    """Its verdicts are in. A training group waits for a step, for good once its run has ended; one of an evaluation is
    complete."""
    PLANNED = "planned"
    """The plan row of a step that is not trained yet has it."""
    TRAINED = "trained"
    """A step has trained it."""
    NO_SIGNAL = "no_signal"
    """A step left it out, because its rewards give no gradient."""
    EXPIRED = "expired"
    """A step left it out, because none of its tokens may be trained: too old for `training.max_staleness`, truncated
    (`training.truncated`), or in chains longer than `training.bin_tokens`."""
    FAILED = "failed"
    """All members have ended and fewer than `min_graded` have a reward."""
    DISCARDED = "discarded"
    """`ratchet resume --skip-step` discarded the plan row that had it."""
    CANCELLED = "cancelled"
    """A person cancelled it, or its run ended."""


class Outcome(StrEnum):
    """The end of a rollout. NULL in the store exactly while the rollout is open; only the first two have a reward."""

    GRADED = "graded"
    """A grader gave a verdict, solved or not."""
    REJECTED = "rejected"
    """An integrity rule rejected the patch; worth no more than a patch that solves nothing."""
    INFRA_FAILED = "infra_failed"
    """No attempt produced a patch within the allowed boxes and time, or the workflow was terminated; no reward."""
    GRADER_FAILED = "grader_failed"
    """No grading box gave a verdict, or the run's own reward function failed; no reward."""
    CANCELLED = "cancelled"
    """The rollout, its group or its run was cancelled; no reward."""


REWARDED_OUTCOMES = (Outcome.GRADED, Outcome.REJECTED)
FAILED_OUTCOMES = (Outcome.INFRA_FAILED, Outcome.GRADER_FAILED)


class Suspicion(StrEnum):
    """An end of tests that a patch and a machine can both cause. The patch is to blame for one that two boxes show."""

    NOT_APPLIED = "not_applied"
    """Git does not apply the patch to its own base commit."""
    NOT_PREPARED = "not_prepared"
    """The tests cannot be put in or started with the patch."""
    TIMED_OUT = "timed_out"
    """The tests' time was over."""
    KILLED = "killed"
    """Processes of the tests ended before they reported."""
    NO_TEST = "no_test"
    """The command ended by itself, and no test that counts ran and failed."""
    REFUSED = "refused"
    """Any of this, or a failed test, and the log has a message of a machine without room."""


class AgentExit(StrEnum):
    """The end of the agent's program: a fact, not an error. A rollout is graded after any of them except `starved`."""

    DONE = "done"
    """The program ended by itself and reported success."""
    TURN_LIMIT = "turn_limit"
    """The program reached `harness.max_turns` model calls."""
    CONTEXT_FULL = "context_full"
    """The next prompt would not fit into `sampling.max_context_tokens`, or the program gave up because its model's
    answers were cut at the token limit."""
    TIME_BUDGET = "time_budget"
    """The program was ended at its deadline, or because it made no model call for `limits.stall_seconds`."""
    CRASHED = "crashed"
    """The program, or its launcher, ended with an error of its own."""
    STARVED = "starved"
    """The program ended because it could not reach its model, or ended before its first model call, however it ended;
    infrastructure, so the rollout gets a new attempt if one is left."""


TRUNCATED_EXITS = (AgentExit.TURN_LIMIT, AgentExit.CONTEXT_FULL, AgentExit.TIME_BUDGET)


class AttemptState(StrEnum):
    """State of an attempt: open → sealed when the rollout gets its outcome, open → superseded by a later attempt."""

    OPEN = "open"
    """Stages of this attempt may write."""
    SEALED = "sealed"
    """The rollout has its outcome. Final."""
    SUPERSEDED = "superseded"
    """A later attempt has replaced this one; all its writes are refused. Final."""


class SessionState(StrEnum):
    """State of an adapter session: open → closed, never back."""

    OPEN = "open"
    """The session's tokens are accepted and turns may be opened and completed."""
    CLOSED = "closed"
    """The session is sealed: no turn of it can be opened or completed any more. Final."""


class TurnState(StrEnum):
    """State of a turn: in_flight → completed | aborted."""

    IN_FLIGHT = "in_flight"
    """The row was written before the engine is called; its answer is not stored yet."""
    COMPLETED = "completed"
    """The sampled ids and the answer are stored; this happens before the answer is sent. Final."""
    ABORTED = "aborted"
    """The call failed, but not because of the store, or the session was closed before the answer was stored. Final."""


class TurnKind(StrEnum):
    """The purpose of a model call; `training.train_kinds` names the kinds that are trained."""

    MAIN = "main"
    """A call of the agent's main conversation."""
    SUB_AGENT = "sub_agent"
    """A call of a sub-agent that the agent program started, in a lane of its own."""
    COMPACTION = "compaction"
    """A call that asks the model to summarise the conversation."""
    AUXILIARY = "auxiliary"
    """A call beside the task, such as one for the conversation's title."""


class ForkCause(StrEnum):
    """The reason why a turn does not simply extend a whole stored stream, of any lane, that no other turn extends."""

    ROOT = "root"
    """The turn is the first of a conversation."""
    SUB_AGENT = "sub_agent"
    """The turn is the first of a sub-agent's lane."""
    COMPACTION = "compaction"
    """The turn asks for a summary, or continues from one."""
    EDIT = "edit"
    """The client sent an earlier message with different content."""
    DRIFT = "drift"
    """The client sent equal messages whose text is tokenised differently from the sampled ids."""
    RESTART = "restart"
    """The prompt is the beginning of a stored stream: the client went back, or asked for another sample."""
    STOP = "stop"
    """The previous answer did not end with the template's end-of-turn token, for example at a length limit."""
    THINKING = "thinking"
    """The chat template removed the reasoning of earlier answers."""
    REASONING = "reasoning"
    """The client sent an earlier answer back without its reasoning, which was not put back."""


class UnreadCause(StrEnum):
    """The reason why a call of a sampled text is text for the client, or why an endpoint's answer has no tokens."""

    NO_PARSER = "no_parser"
    """The model's parser does not read it."""
    CHANGED = "changed"
    """The parser's call, written by the chat template, is another one than was sampled."""
    NOT_OFFERED = "not_offered"
    """Its tool was not offered, or was not chosen."""
    ARGUMENTS = "arguments"
    """Its arguments are no JSON that can be kept, lack a required one or violate a strict schema."""
    ENDPOINT_CUT = "endpoint_cut"
    """An endpoint's answer was ended by a limit or a stop sequence."""
    ENDPOINT_UNWRITTEN = "endpoint_unwritten"
    """The chat template does not write the endpoint's answer, or its text is read as another message."""


PRE_COMMANDS = "pre_commands"
OpenedUse = Literal["agent", "grade", "pre_commands"]
"""A use of boxes whose network can be opened."""


class SandboxRole(StrEnum):
    """The purpose of a box."""

    AGENT = "agent"
    """The agent works in it; it can reach the adapter."""
    GRADE = "grade"
    """A grader runs hidden tests in it; it has no network."""


class SandboxState(StrEnum):
    """State of a row in the ledger of boxes.

    creating → live → release_wanted → released. `live` may be skipped, and so may `release_wanted` if the box is killed
    before its release is recorded (admission), after which the sweep finds the row in either case.
    """

    CREATING = "creating"
    """The row exists and the provider is asked for the box; it has no provider id yet."""
    LIVE = "live"
    """The provider made the box and its id is stored."""
    RELEASE_WANTED = "release_wanted"
    """The box is to be killed, for a stored reason. Written before the kill, so a crash in between leaks no box."""
    RELEASED = "released"
    """The provider has killed the box, or does not know it any more. Final."""


class BatchState(StrEnum):
    """State of a plan row: planned → stepped → committed. A restarted learner replays rows that are not committed."""

    PLANNED = "planned"
    """The planner fixed the members of the step; the learner has not trained it yet."""
    STEPPED = "stepped"
    """The learner trained the step and published its weights; no checkpoint contains it yet."""
    COMMITTED = "committed"
    """A complete checkpoint contains the step. Final."""


class PolicyVersionState(StrEnum):
    """State of published weights: published → retired."""

    PUBLISHED = "published"
    """The files are complete and engines may load them."""
    RETIRED = "retired"
    """The files may be deleted, because `training.kept_versions` newer steps exist. Final."""


class EngineState(StrEnum):
    """State of an engine.

    starting → ready → syncing → ready | quarantined; quarantined or any other state → gone when its process ends. The
    process that starts next at the same address begins at `starting`.
    """

    STARTING = "starting"
    """The wrapper registered the engine; vLLM is not ready to serve the newest policy yet."""
    READY = "ready"
    """The engine serves the version in its row and receives calls."""
    SYNCING = "syncing"
    """The engine is paused under a lease while it receives new weights."""
    QUARANTINED = "quarantined"
    """The weights that it serves could not be verified; it receives no calls and its wrapper restarts it."""
    GONE = "gone"
    """The vLLM process has ended."""


class SteeringAction(StrEnum):
    """A request that a person can make of a run or of a part of it; each change has a row in the table `steering`."""

    PAUSE = "pause"
    """Start nothing new until the run is resumed; what is in flight goes on."""
    RESUME = "resume"
    """Let a run go on that is paused, stopped, failed or cancelled, or is to drain or to stop."""
    DRAIN = "drain"
    """Start no new groups and end the run when those in flight are settled."""
    STOP = "stop"
    """End the run after the step that is planned."""
    SKIP_STEP = "skip_step"
    """Discard the batch of a paused run's next step untrained."""
    EXTEND = "extend"
    """Add steps; a run that has ended goes on."""
    SET = "set"
    """Change a value of the config."""
    CANCEL = "cancel"
    """Cancel a group, a rollout or an evaluation."""
    RETRY = "retry"
    """Run the members of a group, or one rollout, again that have ended without a verdict, or try a stage now."""
    EVALUATE = "evaluate"
    """Evaluate the policy at the next step boundary."""


class Wish(StrEnum):
    """The end that a person wants for an open run, stored in the run's row and read by TrainRun between steps.

    none → drain | stop, drain → stop (`ratchet stop --drain` and `ratchet stop`), drain or stop → none (`ratchet
    resume`).
    """

    NONE = "none"
    """Train all steps."""
    DRAIN = "drain"
    """Start no new groups; end the run when those in flight are trained, or will never be."""
    STOP = "stop"
    """Cancel the open groups; end the run after the step that is planned, or at once if none is."""


SEARCH_ATTRIBUTES: dict[str, str] = {
    "ratchet_run": "Keyword",
    "ratchet_task": "Keyword",
    "ratchet_outcome": "Keyword",
    "ratchet_harness": "Keyword",
    "ratchet_reward": "Double",
    "ratchet_step": "Int",
}
"""Search attributes and their types, as `ratchet up` registers them."""


def policy_version(run_id: str, step: int, epoch: int) -> str:
    """Return `<run_id>/<step>.e<epoch>`, the label of published weights."""
    return f"{run_id}/{step}.e{epoch}"


def chained_versions(files: Iterable[JsonObject]) -> set[str]:
    """Return the versions whose files at an address are needed to make these `files` of a version's row.

    That is none if all of them are stored whole (`engine/weight_deltas.py`).
    """
    return {link["version"] for file in files for link in file.get("chain", ())}


def policy_step(version: str) -> int:
    """Return the step of a policy version label. Raises ValueError for any other text."""
    run_id, _, tail = version.rpartition("/")
    step, separator, epoch = tail.partition(".e")
    if not run_id or not separator or not epoch.isdigit():
        raise ValueError(f"policy version {version!r} is not <run_id>/<step>.e<epoch>")
    return int(step)
