"""A run as a simulation of events, whose ledger has a bottleneck that is known.

Groups are made up to the staleness bound, rollouts wait for boxes, a step is planned when enough groups are ready and
the learner is free, as in TrainRun. Changing one duration and running again shows what that duration costs.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from reads.run_times import BoxTimes, GroupTimes, Interval, RolloutTimes, RunTimes, TrainedStepTimes

MADE = 1_000_000.0
"""The time at which the run begins, in seconds since the epoch."""


@dataclass(frozen=True)
class Pipeline:
    """Durations in seconds. `straggler`: factor of the agent's time in one rollout of every eighth group. `useless`: so
    many groups of ten give no signal. `evaluation`: after every second step.
    """

    boxes: int = 200
    boot: float = 1.0
    engine: float = 10.0
    no_engine: float = 0.0
    tools: float = 5.0
    grade: float = 3.0
    straggler: float = 1.0
    learner: float = 2.0
    sync: float = 0.5
    evaluation: float = 0.0
    useless: int = 0
    groups_per_step: int = 4
    group_size: int = 4
    staleness: int = 0
    steps: int = 10


@dataclass
class _OpenGroup:
    number: int
    created: float
    left: int


class _Simulation:
    def __init__(self, settings: Pipeline) -> None:
        self.settings = settings
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.free = settings.boxes
        self.waiting: deque[Callable[[float], None]] = deque()
        self.published = self.planned = self.num_groups = self.num_open = 0
        self.ready: list[_OpenGroup] = []
        self.is_busy = False
        self.times = RunTimes("simulated", [], [], [], [])

    def at(self, time: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), what))

    def run(self) -> RunTimes:
        self.make_groups(MADE)
        while self.events and len(self.times.steps) < self.settings.steps:
            time, _, what = heapq.heappop(self.events)
            what(time)
        return self.times

    # ------------------------------------------------------------ groups

    def make_groups(self, now: float) -> None:
        settings = self.settings
        last = min(self.published + 1 + settings.staleness, settings.steps)
        room = (last - self.planned) * settings.groups_per_step - self.num_open - len(self.ready)
        for _ in range(room):
            self.num_groups += 1
            self.num_open += 1
            group = _OpenGroup(self.num_groups, now, settings.group_size)
            for member in range(settings.group_size):
                self.begin(now, group, member)

    def end_member(self, now: float, group: _OpenGroup) -> None:
        group.left -= 1
        if group.left:
            return
        self.num_open -= 1
        if group.number % 10 < self.settings.useless:
            self.times.groups.append(GroupTimes(group.number, self.planned + 1, "no_signal", group.created, now))
        else:
            self.ready.append(group)
            self.times.groups.append(GroupTimes(group.number, None, "ready", group.created, now))
        self.make_groups(now)
        self.plan(now)

    def plan(self, now: float) -> None:
        size = self.settings.groups_per_step
        if self.is_busy or len(self.ready) < size or self.planned >= self.settings.steps:
            return
        self.is_busy = True
        self.planned += 1
        step = self.planned
        taken = {group.number for group in self.ready[:size]}
        del self.ready[:size]
        self.times.groups = [
            GroupTimes(one.group_id, step, "trained", one.created, one.ready) if one.group_id in taken else one
            for one in self.times.groups
        ]
        stepped = now + self.settings.learner
        self.make_groups(now)
        self.at(stepped, lambda time: self.times.steps.append(TrainedStepTimes(step, now, time, self.settings.sync)))
        self.at(stepped + self.settings.sync, lambda time: self.publish(time, step))

    def publish(self, now: float, step: int) -> None:
        self.published = step
        until = now
        if self.settings.evaluation and step % 2 == 0:
            until = now + self.settings.evaluation
            self.times.evaluations.append(Interval(now, until))
        self.at(until, self.go_on)

    def go_on(self, now: float) -> None:
        self.is_busy = False
        self.make_groups(now)
        self.plan(now)

    # ------------------------------------------------------------ one rollout

    def begin(self, now: float, group: _OpenGroup, member: int) -> None:
        settings = self.settings
        factor = settings.straggler if member == 0 and group.number % 8 == 0 else 1.0
        agent = (settings.engine + settings.no_engine + settings.tools) * factor
        boxes: list[BoxTimes] = []

        def agent_granted(granted: float) -> None:
            live = granted + settings.boot
            self.at(live + agent, lambda ended: agent_ended(granted, live, ended))

        def agent_ended(granted: float, live: float, ended: float) -> None:
            boxes.append(BoxTimes(False, granted, live, ended))
            self.release(ended)
            self.request(ended, grading_granted, first=True)

        def grading_granted(granted: float) -> None:
            live = granted + settings.boot
            self.at(live + settings.grade, lambda ended: graded(granted, live, ended))

        def graded(granted: float, live: float, ended: float) -> None:
            boxes.append(BoxTimes(True, granted, live, ended))
            self.release(ended)
            calls = (settings.engine + settings.no_engine) * factor
            number = len(self.times.rollouts) + 1
            rollout = RolloutTimes(number, group.number, now, ended, agent, boxes, calls, settings.no_engine * factor)
            rollout.num_sampled = rollout.num_trained = 100
            self.times.rollouts.append(rollout)
            self.end_member(ended, group)

        self.request(now, agent_granted)

    def request(self, now: float, granted: Callable[[float], None], first: bool = False) -> None:
        if self.free:
            self.free -= 1
            granted(now)
        elif first:
            self.waiting.appendleft(granted)
        else:
            self.waiting.append(granted)

    def release(self, now: float) -> None:
        if self.waiting:
            self.waiting.popleft()(now)
        else:
            self.free += 1


def simulate(settings: Pipeline) -> RunTimes:
    """Return when everything happened; groups that no step has taken yet are left out."""
    times = _Simulation(settings).run()
    times.groups = [one for one in times.groups if one.use != "ready"]
    kept = {group.group_id for group in times.groups}
    times.rollouts = [one for one in times.rollouts if one.group_id in kept]
    return times


def duration(times: RunTimes) -> float:
    """Return the seconds from the first group to the newest weights in the engines."""
    return max(one.stepped + one.sync_seconds for one in times.steps) - MADE
