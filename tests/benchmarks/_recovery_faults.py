"""The faults of the benchmark of recovery, by name, and what shows that work goes on after each."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ratchet.temporal_settings import QUEUES
from stack.parts import WATCHER
from tests.benchmarks._recovery_stack import AFTER_APPLY, IN_MID_TEST, Recovery
from tests.chaos.chaos_stack import PATIENCE_SECONDS, worker_part
from tests.chaos.machine_faults import (
    MissingPrivilegeError,
    cut_port,
    end_job,
    fill_disk,
    kill_boxes,
    kill_everything,
    list_boxes,
    lose_share,
    refuse_port,
    suspend_box,
    wait_for_command,
)

SUSPENDED_SECONDS = 12.0
_CUT_SECONDS = PATIENCE_SECONDS - 5
_REFUSED_SECONDS = 75.0
_SERVICE_AWAY_SECONDS = 75 * 60.0
_FULL_SECONDS = 20.0
_POSTGRES_SECONDS = 300.0
_TEMPORAL_SECONDS = 35.0
_LOST_SHARE = 0.15

PARTS = (
    *(worker_part(queue) for queue in QUEUES),
    "adapter",
    "engine",
    "learner",
    "ray",
    "gateway",
    "postgres",
    "temporal",
)

PROGRESS = {
    "boot": "SELECT min(live_at) FROM sandbox WHERE live_at > to_timestamp($1)",
    "agent": "SELECT min(created_at) FROM patch WHERE created_at > to_timestamp($1)",
    "grade": "SELECT min(created_at) FROM grade WHERE created_at > to_timestamp($1)",
    "learn": "SELECT min(stepped_at) FROM batch WHERE stepped_at > to_timestamp($1)",
    "turn": "SELECT min(completed_at) FROM turn WHERE completed_at > to_timestamp($1)",
    "outcome": "SELECT min(ended_at) FROM rollout WHERE outcome IS NOT NULL AND ended_at > to_timestamp($1)",
}
"""Kind of work → when it was done first after a moment. Each fault names the work of what it hits."""

_WORK = {
    "worker-boot": "boot",
    "worker-agent": "agent",
    "worker-grade": "grade",
    "worker-learn": "learn",
    "adapter": "turn",
    "engine": "turn",
    "learner": "learn",
    "ray": "learn",
    "gateway": "boot",
}


@dataclass(slots=True)
class Injury:
    """The effect of a fault. `outage_seconds`: time for which it kept something away. `boxes`: boxes that it ended
    itself."""

    began_at: float
    ended_at: float = 0.0
    outage_seconds: float = 0.0
    boxes: set[str] = field(default_factory=set)


Inject = Callable[[Recovery, Injury, random.Random], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """`work`: a key of PROGRESS, the work of the part that is hit. `prepare` waits for the right moment. `judged`: the
    rollouts that the fault must not harm. `may_pause`: a run may be paused with a reason that has these words, as the
    documentation says; the bench resumes it, as an operator would. Any other pause is a violation.
    """

    name: str
    inject: Inject
    work: str = "outcome"
    prepare: Callable[[Recovery], None] = lambda _: None
    judged: Callable[[Recovery], list[int]] = Recovery.live
    may_pause: str = ""


def _kill(part: str) -> Inject:
    return lambda recovery, injury, rng: recovery.faults.kill(part)


def _suspend(part: str) -> Inject:
    def suspend(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
        injury.outage_seconds = SUSPENDED_SECONDS
        recovery.faults.suspend(part, SUSPENDED_SECONDS)

    return suspend


def _freeze(part: str) -> Inject:
    return lambda recovery, injury, rng: recovery.faults.freeze(part)


def _hold(part: str, seconds: float) -> Inject:
    def hold(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
        injury.outage_seconds = seconds
        recovery.faults.hold_down(part, seconds)

    return hold


def _kill_box(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.boxes |= kill_boxes(recovery.stack, [rng.choice(_agent_boxes(recovery))])


def _suspend_box(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.outage_seconds = SUSPENDED_SECONDS
    suspend_box(recovery.stack, rng.choice(_agent_boxes(recovery)), SUSPENDED_SECONDS)


def _lose_boxes(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.boxes |= lose_share(recovery.stack, _agent_boxes(recovery), _LOST_SHARE, rng)


def _agent_boxes(recovery: Recovery) -> list[str]:
    rows = recovery.store.rows(
        "SELECT provider_id FROM sandbox WHERE state = 'live' AND role = 'agent' AND rollout_id IN"
        " (SELECT rollout_id FROM turn) ORDER BY id"
    )
    return [row[0] for row in rows]


def _cut_network(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.outage_seconds = _CUT_SECONDS
    cut_port(recovery.stack.ports["adapter"], _CUT_SECONDS)


def _refuse_gateway(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.outage_seconds = _REFUSED_SECONDS
    refuse_port(recovery.stack.ports["gateway"], _REFUSED_SECONDS)


def _lose_service(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    """Refuse the gateway's port as if the sandbox service were another company's: the watcher cannot restart it."""
    injury.outage_seconds = _SERVICE_AWAY_SECONDS
    watcher = threading.Thread(target=recovery.faults.suspend, args=(WATCHER, _SERVICE_AWAY_SECONDS))
    watcher.start()
    refuse_port(recovery.stack.ports["gateway"], _SERVICE_AWAY_SECONDS)
    watcher.join()


def _fill_disk(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    if recovery.disk_reason:
        raise MissingPrivilegeError(recovery.disk_reason)
    injury.outage_seconds = _FULL_SECONDS
    fill_disk(recovery.stack.home, _FULL_SECONDS)


def _kill_all(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    kill_everything(recovery.stack, with_boxes=False)
    recovery.up()


def _end_job(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
    injury.boxes |= set(list_boxes(recovery.stack))
    end_job(recovery.stack)
    injury.outage_seconds = time.time() - injury.began_at
    recovery.up()


def _at(command: str) -> Callable[[Recovery], None]:
    return lambda recovery: wait_for_command(recovery.stack, command)


def single_faults() -> dict[str, Fault]:
    """Return every fault by its name, in the order of the table."""
    found = [Fault(f"kill {part}", _kill(part), _WORK.get(part, "outcome")) for part in PARTS if part != "temporal"]
    found += [
        Fault("kill worker-grade after apply", _kill("worker-grade"), "grade", _at(AFTER_APPLY)),
        Fault("kill worker-grade in mid-test", _kill("worker-grade"), "grade", _at(IN_MID_TEST)),
        Fault("kill one box", _kill_box),
        Fault("temporal away for 35 s", _hold("temporal", _TEMPORAL_SECONDS)),
    ]
    found += [Fault(f"suspend {part}", _suspend(part), _WORK.get(part, "outcome")) for part in PARTS]
    found += [Fault("suspend one box", _suspend_box)]
    found += [Fault(f"freeze {part}", _freeze(part), _WORK.get(part, "outcome")) for part in PARTS]
    found += [
        Fault("network cut between boxes and adapter", _cut_network, "turn"),
        Fault("gateway refuses for 75 s", _refuse_gateway, "boot"),
        Fault("15% of the boxes lost", _lose_boxes),
        Fault("state directory full for 20 s", _fill_disk, may_pause="make room, then resume the run"),
        Fault("everything killed but the boxes", _kill_all),
        Fault("batch job ended and started again", _end_job),
        Fault("postgres away for 5 minutes", _hold("postgres", _POSTGRES_SECONDS)),
    ]
    return {fault.name: fault for fault in found}


def long_faults() -> dict[str, Fault]:
    """Return the faults that take over an hour each, which are run only by name."""
    fault = Fault("sandbox service away for 75 minutes", _lose_service, "boot", judged=Recovery.in_flight)
    return {fault.name: fault}


def pair_faults(seed: int, count: int = 6) -> dict[str, Fault]:
    """Return pairs of short faults that begin at the same moment, drawn by the seed."""
    rng = random.Random(f"pairs {seed}")
    short = [
        fault for fault in single_faults().values() if fault.name.startswith("kill") and "grade " not in fault.name
    ]
    found: dict[str, Fault] = {}
    while len(found) < count:
        one, other = rng.sample(short, 2)
        fault = Fault(f"{one.name} + {other.name.removeprefix('kill ')}", _both(one, other))
        found[fault.name] = fault
    return found


def _both(one: Fault, other: Fault) -> Inject:
    def inject(recovery: Recovery, injury: Injury, rng: random.Random) -> None:
        errors: list[BaseException] = []

        def run(fault: Fault) -> None:
            try:
                fault.inject(recovery, injury, rng)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(fault,)) for fault in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return inject
