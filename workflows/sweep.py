"""The Sweep workflow, started every `sweep.interval` seconds: end boxes and rollouts that no workflow owns."""

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.sweep import SweepActivities
    from ratchet.payloads import StageOptions
    from ratchet.sweep_payloads import SweepInput, SweepResult
    from workflows.activity_options import run_activity

_OPTIONS = StageOptions(queue="", start_to_close_seconds=300, heartbeat_seconds=60, max_tries=3)


@workflow.defn(name="Sweep", failure_exception_types=[ValidationError])
class Sweep:
    @workflow.run
    async def run(self, input: SweepInput) -> SweepResult:
        return await run_activity(SweepActivities.sweep, input, _OPTIONS)
