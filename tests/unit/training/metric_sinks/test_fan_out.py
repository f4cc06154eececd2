"""No sink stops or slows the learner: one that hangs, raises, is slow or has no disk loses only its own points."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboardX.proto.event_pb2 import Event

from ratchet.config import METRIC_SINKS, MetricSinkConfig, RunConfig
from training.metric_sinks.fan_out import MetricPoint, MetricSinks, SinkThread
from training.metric_sinks.registry import SINKS
from training.metric_sinks.sink import SinkRun
from training.metrics import alarms


class ListSink:
    """Keeps what it gets; `gate` holds it up, and it raises for the steps of `broken`."""

    def __init__(self, run: SinkRun | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.run = run
        self.options = options
        self.steps: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.broken: set[int] = set()
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.at_gate.set()
        self.gate.wait()
        if step in self.broken:
            raise OSError("No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def thread_of(sink: ListSink, **more: Any) -> SinkThread:
    return SinkThread("list", lambda: sink, **more)


def test_every_point_arrives_in_order_and_the_sink_is_closed() -> None:
    sink = ListSink()
    sinks = MetricSinks([thread_of(sink)])
    for step in range(200):
        sinks.write(step, {"loss": 1.0})
    sinks.close()
    assert sink.steps == list(range(200)) and sink.closed


def test_a_sink_that_hangs_holds_nothing_up_and_its_loss_is_counted_once() -> None:
    hangs, works = ListSink(), ListSink()
    hangs.gate.clear()
    sinks = MetricSinks([thread_of(hangs, max_queued=3), thread_of(works)])
    sinks.write(0, {})
    assert hangs.at_gate.wait(100)
    started = time.monotonic()
    with capture_logs() as logs:
        for step in range(1, 100):
            sinks.write(step, {})
        assert sinks.lost_metrics() == {"sink_lost_list": 96.0}
        assert sinks.lost_metrics() == {}
        assert sinks.close(0.2) == {"sink_lost_list": 4.0}  # three that are queued, and the one in hand
    assert time.monotonic() - started < 60, "a sink was waited for"
    said = [one["event"] for one in logs]
    assert said.count("metric sink loses points") == 1 and "metric sink did not end" in said
    assert works.steps == list(range(100)) and works.closed
    hangs.gate.set()


def test_a_sink_that_raises_loses_that_point_only() -> None:
    sink = ListSink()
    sink.broken = {2, 3, 7}
    thread = thread_of(sink)
    for step in range(10):
        thread.put(MetricPoint(step, {}))
    thread.end()
    assert thread.join(100)
    assert sink.steps == [0, 1, 4, 5, 6, 8, 9] and thread.take_lost() == 3


@pytest.mark.parametrize("error", [ImportError("no module named wandb"), SystemExit(1), KeyboardInterrupt()])
def test_a_client_that_cannot_be_opened_is_tried_again_at_the_next_point(error: BaseException) -> None:
    sink = ListSink()
    failures = [error, error]

    def make() -> ListSink:
        if failures:
            raise failures.pop()
        return sink

    thread = SinkThread("list", make)
    for step in range(4):
        thread.put(MetricPoint(step, {}))
    thread.end()
    assert thread.join(100)
    assert sink.steps == [2, 3] and thread.take_lost() == 2


def test_a_sink_writes_nothing_to_a_disk_that_is_almost_full() -> None:
    sink = ListSink()
    space = iter([True, False, True])
    thread = thread_of(sink, has_space=lambda: next(space))
    for step in range(3):
        thread.put(MetricPoint(step, {}))
    thread.end()
    assert thread.join(100)
    assert sink.steps == [0, 2] and thread.take_lost() == 1


def test_a_sink_that_does_not_close_bounds_the_end() -> None:
    class NeverCloses(ListSink):
        def close(self) -> None:
            released.wait()

    released = threading.Event()
    sinks = MetricSinks([thread_of(NeverCloses()), thread_of(NeverCloses())])
    sinks.write(1, {})
    started = time.monotonic()
    sinks.close(0.2)
    assert time.monotonic() - started < 60, "a sink was waited for"
    released.set()


def test_lost_points_raise_an_alarm() -> None:
    assert "metric_sink" in alarms({"sink_lost_wandb": 2.0})
    assert "metric_sink" not in alarms({"loss": 1.0})


def test_the_config_names_the_sinks_that_there_are() -> None:
    assert tuple(SINKS) == METRIC_SINKS
    rows = [{"path": "x.jsonl"}]
    own = {"sinks": [{"name": "my.module:Sink"}, {"name": "wandb", "options": {"mode": "offline"}}]}
    assert RunConfig.model_validate({"datasets": rows, "metrics": own}).metrics.sinks[1].options == {"mode": "offline"}
    with pytest.raises(ValueError, match=r"'wandbb' is unknown.*wandb"):
        RunConfig.model_validate({"datasets": rows, "metrics": {"sinks": [{"name": "wandbb"}]}})


def run_at(directory: Path) -> SinkRun:
    return SinkRun("run-1", 2, directory, {"seed": 0})


def write_all(directory: Path, *wanted: MetricSinkConfig) -> MetricSinks:
    """Two learners of one run, the second of which writes step 2 again."""
    sinks = MetricSinks()
    for epoch, steps in ((2, (1, 2)), (3, (2, 3))):
        sinks.open(wanted, replace(run_at(directory), epoch=epoch))
        for step in steps:
            sinks.write(step, {"loss": 0.5 * step, "reward_mean": 1.0})
        assert not sinks.close(60)
    return sinks


def test_tensorboard_files_have_every_metric(tmp_path: Path) -> None:
    write_all(tmp_path, MetricSinkConfig())
    (first, *_) = sorted((tmp_path / "tensorboard" / "run-1").glob("events.out.tfevents.*.e2"))
    data, events = first.read_bytes(), []
    while data:  # length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}
    assert values["training/loss", 2] == 1.0 and values["training/reward_mean", 1] == 1.0


OWN_SINK = """
class FileSink:
    def __init__(self, run, options):
        run.directory.mkdir(parents=True)
        self.file = (run.directory / options["file"]).open("w")

    def write(self, step, metrics):
        print(step, sorted(metrics), file=self.file)

    def close(self):
        self.file.close()
"""


def test_a_sink_of_ones_own_gets_run_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metric_sink.py").write_text(OWN_SINK)
    sinks = MetricSinks()
    sinks.open([MetricSinkConfig(name="own_metric_sink:FileSink", options={"file": "a.txt"})], run_at(tmp_path))
    sinks.write(4, {"loss": 1.0})
    sinks.close()
    assert (tmp_path / "filesink" / "a.txt").read_text() == "4 ['loss']\n"


def test_a_sink_that_is_false_is_made_once(tmp_path: Path) -> None:
    class EmptySink(ListSink):
        def __len__(self) -> int:
            return 0

    made: list[EmptySink] = []

    def make() -> EmptySink:
        made.append(EmptySink())
        return made[-1]

    sinks = MetricSinks([SinkThread("list", make)])
    for step in range(3):
        sinks.write(step, {})
    assert not sinks.close(60)
    assert [one.steps for one in made] == [[0, 1, 2]]


def test_options_are_resolved_and_sinks_of_one_name_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    (tmp_path / "own_metric_sink.py").write_text(OWN_SINK)
    (tmp_path / "secrets.env").write_text("FILE_NAME=secret-name\n")
    sinks = MetricSinks()
    wanted = [{"file": "${FILE_NAME}.txt"}, {"file": "b.txt"}, {"file": "${NOT_SET}/secret-name"}]
    with capture_logs() as logs:
        sinks.open([MetricSinkConfig(name="own_metric_sink:FileSink", options=one) for one in wanted], run_at(tmp_path))
        sinks.write(4, {"loss": 1.0})
        assert sinks.close(60) == {"sink_lost_filesink_3": 1.0}
    assert (tmp_path / "filesink" / "secret-name.txt").read_text() == "4 ['loss']\n"
    assert (tmp_path / "filesink_2" / "b.txt").read_text() == "4 ['loss']\n"
    (said,) = [one["reason"] for one in logs if one["event"] == "metric sink loses points"]
    assert "${NOT_SET} has no value" in said


EXTRA = "no dependency of ours: a user installs it"


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=f"wandb is {EXTRA}")
    write_all(tmp_path, MetricSinkConfig(name="wandb", options={"mode": "offline"}))
    files = list((tmp_path / "wandb").rglob("*.wandb"))
    assert len(files) == 2 and all(b"training/loss" in one.read_bytes() for one in files)
