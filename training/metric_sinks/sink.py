"""The interface of a metric sink. The config names a sink of your own as `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(slots=True, frozen=True)
class SinkRun:
    """The run whose metrics are copied. `epoch`: number of the learner, which is higher after each restart.

    `directory`: a directory of this sink in the state directory, for what it keeps; not made yet. `config`: of the run,
    without secrets and without the options of sinks, since a sink may upload it.
    """

    run_id: str
    epoch: int
    directory: Path
    config: Mapping[str, Any]


class MetricSink(Protocol):
    """Made, called and closed in a thread of its own, from first to last. An error loses the point that caused it.

    A step may be written more than once: some of its metrics come later, and a replayed step is written again.
    """

    def __init__(self, run: SinkRun, options: Mapping[str, Any]) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
