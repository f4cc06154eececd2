"""Words of the system as types: states and their transitions.

Why here: one file holds each enum, so the database, the workflows and the CLI cannot drift apart.
Called by: everything; it imports nothing of ours.
"""

from enum import StrEnum

MODEL_NAME = "policy"
"""What engines serve the policy as, and what agents ask for."""

# ---------------------------------------------------------------- states


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    """`ready`: its rule holds and it may be planned. `consumed`: a plan row holds it. `failed`: its rule can no longer hold."""

    OPEN = "open"
    READY = "ready"
    CONSUMED = "consumed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """How a rollout ended. NULL in the store exactly while it is open; only the first two carry a reward."""

    GRADED = "graded"
    REJECTED = "rejected"
    INFRA_FAILED = "infra_failed"
    GRADER_FAILED = "grader_failed"
    CANCELLED = "cancelled"


REWARDED_OUTCOMES = (Outcome.GRADED, Outcome.REJECTED)


class AgentExit(StrEnum):
    """How the agent's program ended. A fact, never an error; all but `starved` are graded."""

    DONE = "done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_FULL = "context_full"
    TIME_BUDGET = "time_budget"
    CRASHED = "crashed"
    STARVED = "starved"


TRUNCATED_EXITS = (AgentExit.TURN_LIMIT, AgentExit.CONTEXT_FULL, AgentExit.TIME_BUDGET)


class AttemptState(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    SUPERSEDED = "superseded"


class SessionState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class TurnState(StrEnum):
    """`in_flight` until the engine's answer is stored, `completed` before the answer's last byte goes out."""

    IN_FLIGHT = "in_flight"
    COMPLETED = "completed"
    ABORTED = "aborted"


class TurnKind(StrEnum):
    MAIN = "main"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    AUXILIARY = "auxiliary"


class ForkCause(StrEnum):
    """Why a turn does not extend its lane's newest stream. `root`: the first turn of a conversation."""

    ROOT = "root"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    EDIT = "edit"
    DRIFT = "drift"
    RESTART = "restart"
    STOP = "stop"
    THINKING = "thinking"


class SandboxRole(StrEnum):
    AGENT = "agent"
    GRADE = "grade"


class SandboxState(StrEnum):
    """Ledger of boxes: the row comes before the box, `release_wanted` before the kill."""

    CREATING = "creating"
    LIVE = "live"
    RELEASE_WANTED = "release_wanted"
    RELEASED = "released"


class BatchState(StrEnum):
    PLANNED = "planned"
    STEPPED = "stepped"
    COMMITTED = "committed"


class PolicyVersionState(StrEnum):
    PUBLISHED = "published"
    RETIRED = "retired"
    SUPERSEDED = "superseded"


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SYNCING = "syncing"
    QUARANTINED = "quarantined"
    GONE = "gone"


class Wish(StrEnum):
    """What a user asked of a run; a wish is recorded in the run's row and honoured between steps."""

    NONE = "none"
    PAUSE = "pause"
    STOP = "stop"


# ---------------------------------------------------------------- search attributes (registered by `ratchet up`)

SEARCH_ATTRIBUTES: dict[str, str] = {
    "ratchet_run": "Keyword",
    "ratchet_task": "Keyword",
    "ratchet_outcome": "Keyword",
    "ratchet_harness": "Keyword",
    "ratchet_reward": "Double",
    "ratchet_step": "Int",
}


def policy_version(run_id: str, step: int, epoch: int) -> str:
    """`<run_id>/<step>.e<epoch>`: the label of published weights."""
    return f"{run_id}/{step}.e{epoch}"


def policy_step(version: str) -> int:
    """The step in a policy version label; raises ValueError for anything that is not one."""
    run_id, _, tail = version.rpartition("/")
    step, separator, epoch = tail.partition(".e")
    if not run_id or not separator or not epoch.isdigit():
        raise ValueError(f"policy version {version!r} is not <run_id>/<step>.e<epoch>")
    return int(step)
