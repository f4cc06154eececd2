"""`Sweep`: releases boxes whose owner is gone and ends rollouts whose workflow is closed or missing.

Why here: the last line against leaks; a schedule starts it every two minutes, and `ratchet up` once.
Called by: the schedule `sweep` and `ratchet sweep`.
"""

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.sweep import SweepActivities
    from ratchet.payloads import StageOptions, SweepInput, SweepResult
    from workflows.options import run_activity

_OPTIONS = StageOptions(queue="control", start_to_close_seconds=300, heartbeat_seconds=60, max_tries=3)


@workflow.defn(name="Sweep", failure_exception_types=[ValidationError])
class Sweep:
    @workflow.run
    async def run(self, input: SweepInput) -> SweepResult:
        return await run_activity(SweepActivities.sweep, input, _OPTIONS)
