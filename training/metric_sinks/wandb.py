"""Weights & Biases: one run of the same id, which a restarted learner continues. WANDB_API_KEY is read by its client.

`mode: offline` of the options writes below the state directory; `wandb sync` uploads it later.
"""

from collections.abc import Mapping
from typing import Any

from training.metric_sinks.sink import SinkRun


class WandbSink:
    """`options` are passed to `wandb.init`, such as `project`, `entity`, `mode` and `tags`."""

    def __init__(self, run: SinkRun, options: Mapping[str, Any]) -> None:
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        own = {
            "project": "ratchet",
            "id": run.run_id,
            "name": run.run_id,
            "resume": "allow",
            "dir": str(run.directory),
            "config": dict(run.config),
            "settings": {"console": "off", "x_disable_stats": True, "silent": True},
        }
        self._run = wandb.init(**{**own, **options})
        # W&B's own step may not go back, but a replayed step is written again.
        self._run.define_metric("training/*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"training/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        self._run.finish()
