"""The section `limits` of a run's config."""

from ratchet.bounded_numbers import Positive, Seconds
from ratchet.config_sections import Section


class LimitsConfig(Section):
    """Time and size limits of a rollout."""

    agent_seconds: Seconds = 1800
    """Time budget of the agent's program, in seconds of the box's clock. Time in which it waits for an engine or an
    adapter does not count (SWE_AGENT_TIME_BUDGET_SEC)."""
    eval_seconds: Seconds = 600
    """Time limit of the tests of one grade, in seconds (SWE_EVAL_TIMEOUT_SEC)."""
    guard_seconds: Seconds | None = None
    """Longest time in seconds for which a rollout may have boxes, outages and waits for us not counted; beyond it the
    rollout gets no further box. None, the default, means agent_seconds + eval_seconds + the margin in temporal.yaml
    (SWE_ROLLOUT_GUARD_SEC)."""
    stall_seconds: Seconds | None = 900
    """Time in seconds without a model call after which the agent is ended with `time_budget`. It must be above
    harness.step_timeout_seconds. None leaves it to agent_seconds."""
    workspace_seconds: Seconds = 300
    """Time limit of a task's pre_commands, in seconds."""
    max_patch_bytes: Positive = 5_000_000
    """Largest size of a diff, in bytes. A larger one is not stored and the rollout is not solved, with the reason."""
