"""MLflow: one run per run of ours, found again by its tag; a server, or files below the state directory."""

import os
import time
from collections.abc import Mapping
from typing import Any

from training.metric_sinks.sink import SinkRun

_TAG = "ratchet_run"


class MlflowSink:
    """`options`: `tracking_uri` (else MLFLOW_TRACKING_URI, else files) and `experiment`, by default `ratchet`."""

    def __init__(self, run: SinkRun, options: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        uri = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # Newer clients refuse a store of files unless they are told that it is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            run.directory.mkdir(parents=True, exist_ok=True)
            uri = run.directory.as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        name = options.get("experiment", "ratchet")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([number], f"tags.{_TAG} = '{run.run_id}'", max_results=1)
        found = known[0] if known else self._client.create_run(number, tags={_TAG: run.run_id}, run_name=run.run_id)
        self._run_id = found.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(f"training/{name}", value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
