"""trackio: a local database below the state directory, or a Hugging Face Space; a restarted learner continues it."""

import os
from collections.abc import Mapping
from typing import Any

from training.metric_sinks.sink import SinkRun


class TrackioSink:
    """`options` are passed to `trackio.init`, such as `project` and `space_id`."""

    def __init__(self, run: SinkRun, options: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.directory))  # read when the client is imported
        import trackio

        own = {
            "project": "ratchet",
            "name": run.run_id,
            "resume": "allow",
            "config": dict(run.config),
            "embed": False,
            "auto_log_cpu": False,
            "auto_log_gpu": False,
        }
        self._run = trackio.init(**{**own, **options})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({f"training/{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
