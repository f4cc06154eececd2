"""TensorBoard event files, one per learner of the run; tensorboardX needs no TensorFlow."""

from collections.abc import Mapping
from typing import Any

from training.metric_sinks.sink import SinkRun


class TensorBoardSink:
    """`options` are passed to tensorboardX's SummaryWriter."""

    def __init__(self, run: SinkRun, options: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        directory = str(run.directory / run.run_id)
        self._writer = SummaryWriter(**{"logdir": directory, "filename_suffix": f".e{run.epoch}", **options})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"training/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
