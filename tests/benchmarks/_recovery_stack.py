"""The stack, the tasks and the run of the benchmark of recovery.

Everything is real except the policy's choices: supervisor, watcher, Postgres, Temporal's server on it, Ray and a
learner that trains random weights, adapter, five workers, gateway, boxes, git, grades. The engine's wrapper runs the
seeded engine in the place of vLLM.
"""

import asyncio
import json
import math
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import yaml

from cli.console import say
from cli.down import kill_stack_boxes
from ratchet.config import RunConfig
from ratchet.sweep_payloads import SweepInput
from ratchet.temporal_settings import load_temporal_settings
from stack.follow_run import start_run
from stack.part_health import HealthState, read_health
from stack.startup import bring_up, connect_stack
from stack.supervisor import Supervisor
from tests.benchmarks._recovery_evidence import Store
from tests.chaos.chaos_stack import SEED_VARIABLE, ChaosStack
from tests.chaos.faults import Faults, wait_until
from tests.chaos.machine_faults import MissingPrivilegeError, end_disk, kill_everything, make_disk
from tests.chaos.seeded_engine import HOLD_FACTOR_VARIABLE, SOLVED_FILE, SOLVED_TEXT
from tests.free_ports import free_ports
from tests.standins.tiny_model import make_tokenizer, make_weights

ROOT = Path(__file__).parents[2]
NUM_TASKS, GROUP_SIZE, MIN_GROUPS_PER_STEP, MAX_STALENESS = 8, 4, 4, 2
AFTER_APPLY, IN_MID_TEST = "sleep 1.0417", "sleep 2.0417"
"""Commands of the hidden test, by which a fault finds the moment that it wants."""
_DISK_GIBIBYTES = 6
_SPARE_BOXES, _MORE_BOXES = 6, 0.25

_COMMIT = "git -c user.name=x -c user.email=x@x commit -qm first"
_TASK = {
    "image": "host",
    "workdir": "/workspace/repo",
    "pre_commands": [f"git init -q . && echo one > {SOLVED_FILE} && git add -A && {_COMMIT}"],
    "eval_cmd": f'{AFTER_APPLY}; {IN_MID_TEST}; test "$(cat {SOLVED_FILE})" = {SOLVED_TEXT}',
    "empty_patch_fails": True,
}


@dataclass
class Recovery:
    """The running stack and its open run.

    `num_live`: rollouts in boxes before a fault. `num_in_flight`: those whose workflow runs, with or without a box.
    `slowness`: how many times as long model calls take as the engine's own. `disk_reason`: why the state directory has
    no file system of its own.
    """

    stack: ChaosStack
    image: Path
    seed: int
    num_live: int
    num_in_flight: int = 0
    slowness: float = 1.0
    disk_reason: str = ""
    run_id: str = ""
    started_at: float = field(default_factory=time.time)

    @property
    def store(self) -> Store:
        return Store(self.stack.environment()["RATCHET_DATABASE_URL"])

    @property
    def faults(self) -> Faults:
        return Faults(self.stack)

    @property
    def max_boxes(self) -> int:
        return self.num_live + max(_SPARE_BOXES, int(_MORE_BOXES * self.num_live))

    @property
    def settle_seconds(self) -> float:
        """The time limit for the live rollouts to end, on two slow cores."""
        return 300.0 + 6.0 * self.num_in_flight

    # ------------------------------------------------------------ life

    @staticmethod
    def make(seed: int, num_live: int, num_in_flight: int, slowness: float) -> "Recovery":
        """Make an empty state directory, on a file system of its own if this machine allows it."""
        base = Path(tempfile.mkdtemp(prefix="ratchet-recovery-"))
        base.chmod(0o755)  # the embedded Postgres runs as another user
        home, image, reason = base / "home", base / "disk.ext4", ""
        home.mkdir()
        try:
            make_disk(home, image, _DISK_GIBIBYTES)
        except MissingPrivilegeError as error:
            reason = str(error)
        os.environ |= {
            "RATCHET_HOME": str(home),
            "RATCHET_TEMPORAL_CONFIG": str(home / "temporal.yaml"),
            SEED_VARIABLE: str(seed),
        }
        recovery = Recovery(ChaosStack(home), image, seed, num_live, max(num_live, num_in_flight), slowness, reason)
        os.environ[HOLD_FACTOR_VARIABLE] = str(slowness)
        (home / "temporal.yaml").write_text(_temporal_settings(recovery.max_boxes))
        free_ports(home)
        return recovery

    def up(self) -> None:
        """Start the stack, or start it again after it was killed."""
        bring_up(self.stack, self.config(1), say)

    def end(self) -> None:
        """Stop the stack with its boxes and remove its state."""
        try:
            if Supervisor(self.stack).is_up():
                asyncio.run(kill_stack_boxes(self.stack.environment()))
        finally:
            Supervisor(self.stack).down()
            kill_everything(self.stack, with_boxes=True)
            end_disk(self.stack.home, self.image)
            shutil.rmtree(self.stack.home.parent, ignore_errors=True)

    # ------------------------------------------------------------ the run

    def config(self, steps: int) -> RunConfig:
        home = self.stack.home
        model, dataset = home / "model", home / "tasks.jsonl"
        if not dataset.is_file():
            make_tokenizer(model)
            make_weights(model)
            lines = [
                json.dumps({"prompt": "make it right", "label": f"task-{number}", "metadata": _TASK})
                for number in range(NUM_TASKS)
            ]
            dataset.write_text("\n".join(lines) + "\n")
        values = {
            "model": str(model),
            "datasets": [{"path": str(dataset)}],
            "harness": {"name": "bash_agent", "max_turns": 12, "step_timeout_seconds": 20},
            "sandbox": {"max_boxes": self.max_boxes},
            "sampling": {"max_context_tokens": 4096, "max_response_tokens": 512},
            "loss": {"preset": "grpo"},
            "training": {
                "steps": steps,
                "groups_per_step": self._groups_per_step(),
                "group_size": GROUP_SIZE,
                "max_staleness": MAX_STALENESS,
                "checkpoint_every": 2,
                "bin_tokens": 8192,
            },
            "evaluation": {"at": []},
            "grading": {"admission": "ignored", "control_share": 0.0},
            "limits": {"agent_seconds": round(120 * self.slowness), "eval_seconds": 60, "workspace_seconds": 60},
        }
        return RunConfig.model_validate(values)

    def _groups_per_step(self) -> int:
        """Return as many as keep more than the wanted rollouts in flight."""
        wanted = max(self.max_boxes, self.num_in_flight)
        return max(MIN_GROUPS_PER_STEP, math.ceil(wanted / (GROUP_SIZE * MAX_STALENESS)))

    def start(self, steps: int) -> None:
        self.run_id = asyncio.run(start_run(self.stack, self.config(steps), "recovery", new=True, say=say))
        self.started_at = time.time()

    def state(self) -> tuple[str, str]:
        row = self.store.rows("SELECT state, state_reason FROM run WHERE run_id = $1", self.run_id)
        return (row[0][0], row[0][1]) if row else ("none", "")

    def live(self) -> list[int]:
        """Return the open rollouts whose agent or grader works in a live box."""
        rows = self.store.rows(
            "SELECT DISTINCT r.id FROM rollout r JOIN sandbox s ON s.rollout_id = r.id"
            " WHERE r.run_id = $1 AND r.outcome IS NULL AND s.state = 'live' ORDER BY r.id",
            self.run_id,
        )
        return [row[0] for row in rows]

    def in_flight(self) -> list[int]:
        """Return the open rollouts whose workflow has begun."""
        rows = self.store.rows(
            "SELECT id FROM rollout WHERE run_id = $1 AND outcome IS NULL AND claimed_at IS NOT NULL ORDER BY id",
            self.run_id,
        )
        return [row[0] for row in rows]

    def num_ended(self, rollouts: list[int]) -> int:
        return int(
            self.store.value(
                "SELECT count(*) FROM rollout WHERE id = ANY($1::bigint[]) AND outcome IS NOT NULL", rollouts
            )
        )

    def wait_until_steady(self) -> list[int]:
        """Wait until every part answers and enough rollouts are live; return these."""
        wait_until(self._answers, "every part answers", 300)
        wait_until(
            lambda: len(self.live()) >= self.num_live and len(self.in_flight()) >= self.num_in_flight,
            f"{self.num_live} rollouts are live and {self.num_in_flight} in flight",
            self.settle_seconds,
        )
        return self.live()

    def _answers(self) -> bool:
        health = read_health(self.stack.home)
        return bool(health) and all(part.state is HealthState.ANSWERING for part in health.values())

    def sweep(self) -> dict[str, object]:
        """Run one sweep and return what it did."""

        async def sweep() -> dict[str, object]:
            settings = load_temporal_settings()
            client = await connect_stack(self.stack, settings)
            return await client.execute_workflow(
                "Sweep",
                SweepInput(force=True),
                id=settings.own(f"sweep/{uuid4().hex[:8]}"),
                task_queue=settings.own("control"),
            )

        return asyncio.run(sweep())


def _temporal_settings(max_boxes: int) -> str:
    """Return temporal.yaml with slots for all boxes and with sweeps that only the benchmark starts, without grace."""
    settings = yaml.safe_load((ROOT / "temporal.yaml").read_text())
    settings["queues"]["agent"]["slots"] = max(max_boxes, settings["queues"]["agent"]["slots"])
    settings["sweep"] |= {"interval": 86_400, "creating_grace": 5, "unknown_grace": 5, "max_share": 1.0}
    return yaml.safe_dump(settings)
