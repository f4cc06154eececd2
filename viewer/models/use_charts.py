"""The use of boxes and engines over time, as charts."""

from collections.abc import Iterable, Sequence

from reads.run_times import CallUse, Interval, RunTimes
from viewer.models.charts import Chart, ChartSeries

NUM_PARTS = 60
_AXIS = "hours"


def use_window(times: RunTimes) -> Interval | None:
    """Return the time from the first group to the last step; None without a trained step."""
    if not times.groups or not times.steps:
        return None
    window = Interval(min(one.created for one in times.groups), max(one.stepped for one in times.steps))
    return window if window.end > window.start else None


def use_charts(times: RunTimes, window: Interval, calls: Sequence[CallUse]) -> list[Chart]:
    """Return the boxes that existed, the calls in flight and the tokens a second, as means over parts of the window."""
    width = (window.end - window.start) / NUM_PARTS
    xs = [round((part + 0.5) * width / 3600, 6) for part in range(NUM_PARTS)]
    by_part = {one.part: one for one in calls}
    in_flight = [by_part[part].call_seconds / width if part in by_part else 0.0 for part in range(NUM_PARTS)]
    sampled = [by_part[part].num_sampled / width if part in by_part else 0.0 for part in range(NUM_PARTS)]
    boxes = {
        label: _mean_number(
            (
                Interval(box.granted, box.released if box.released is not None else window.end)
                for rollout in times.rollouts
                for box in rollout.boxes
                if box.is_grading is is_grading
            ),
            window,
        )
        for label, is_grading in (("agent boxes", False), ("grading boxes", True))
    }
    return [
        _chart("boxes", "Boxes in use", "Mean number of boxes, from their grant to their release.", xs, boxes),
        _chart(
            "calls",
            "Model calls in flight",
            "Mean number of calls, with those that wait for an engine.",
            xs,
            {"calls": in_flight},
        ),
        _chart("sampled", "Sampled tokens per second", "Of the calls that ended.", xs, {"tokens": sampled}),
    ]


def _mean_number(intervals: Iterable[Interval], window: Interval) -> list[float]:
    """Return for each part of the window how many of the intervals it has, weighted by the time."""
    width = (window.end - window.start) / NUM_PARTS
    seconds = [0.0] * NUM_PARTS
    for one in intervals:
        start, end = max(one.start, window.start) - window.start, min(one.end, window.end) - window.start
        for part in range(max(0, int(start / width)), min(NUM_PARTS - 1, int(end / width)) + 1):
            seconds[part] += max(0.0, min(end, (part + 1) * width) - max(start, part * width))
    return [one / width for one in seconds]


def _chart(name: str, title: str, note: str, xs: list[float], series: dict[str, list[float]]) -> Chart:
    lines = [ChartSeries(label, [round(one, 4) for one in values], [], []) for label, values in series.items()]
    return Chart(name, title, note, _AXIS, xs, lines, [])
