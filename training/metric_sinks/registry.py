"""The sinks by name. A sink's client is imported only if the config names it."""

from ratchet.import_path import import_object
from training.metric_sinks.sink import MetricSink

_HERE = "training.metric_sinks"
SINKS = {"tensorboard": f"{_HERE}.tensorboard:TensorBoardSink", "wandb": f"{_HERE}.wandb:WandbSink"}


def load_sink(name: str) -> type[MetricSink]:
    """Return the class of a sink of this table, or of one that is named `package.module:Class`. Raises ImportError."""
    found: type[MetricSink] = import_object(SINKS.get(name, name))
    return found
