"""The oracle of a task: what a true run of its tests looks like, recorded from runs with the gold patch.

A verdict does not rest on what a run says of itself alone: a run that differs from the oracle is not solved. Tasks that
were not admitted have no oracle, and their verdicts say so.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from grading.flags import Flag
from grading.printed_results import MAX_CHARACTERS, count_printed_results
from grading.run_hidden_tests import RunnerReport, RunnerSession
from ratchet.types import JsonObject

_NAME_DIGITS = 8
_MAX_LINE = 200
_CPU_FACTOR, _CPU_SHARE = 5, 0.25


@dataclass(slots=True, frozen=True)
class Oracle:
    """One or several gold runs. `outcomes`: test → the outcome that all of them had; a test whose outcome varied is
    left out. `num_sessions` and `exit_code`: None if they varied. `canaries`: results of the sessions' canaries.
    `modules`: test file → digests of the code that its tests run, as the witness reports them; each begins with the
    digest of the test's name. `selected`: digests of the names of the tests that control runs repeat, which the gold
    patch passed without the others; empty: control runs repeat all tests. `may_run_more`: control runs follow, so that
    more sessions are no difference. `cpu_seconds`: the most that a gold run used, None if it was not measured.
    `last_line` of the log without its digits, empty if it varied or pytest ran. `num_results`: how often the log tells
    of tests that ran, the least of the gold runs; 0 if pytest ran or the log is too long."""

    outcomes: dict[str, str] = field(default_factory=dict)
    num_sessions: int | None = None
    exit_code: int | None = None
    canaries: tuple[str, ...] = ()
    modules: dict[str, list[str]] = field(default_factory=dict)
    selected: tuple[str, ...] = ()
    may_run_more: bool = False
    cpu_seconds: float | None = None
    last_line: str = ""
    num_results: int = 0

    @classmethod
    def of_run(cls, observed: RunnerReport, outcomes: dict[str, str]) -> Self:
        top = observed.top_sessions
        return cls(
            outcomes=dict(outcomes),
            num_sessions=len(top),
            exit_code=observed.exit_code,
            canaries=tuple(sorted({session_canary(session, observed) for session in top})),
            modules={path: sorted(codes) for path, codes in module_codes(observed).items()},
            cpu_seconds=observed.cpu_seconds,
            last_line="" if top else next(reversed(_lines(observed.log)), ""),
            num_results=0 if top or len(observed.log) > MAX_CHARACTERS else count_printed_results(observed.log),
        )

    @classmethod
    def of_json(cls, values: JsonObject) -> Self:
        """Return the oracle that `as_json` stored. Keys of a later version are ignored."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        tuples = {name: tuple(values.get(name, ())) for name in ("canaries", "selected")}
        return cls(**{**known, **tuples})

    def as_json(self) -> JsonObject:
        """Return the oracle as a JSON column, without `may_run_more`, which is a fact of a judgement."""
        values = asdict(self)
        del values["may_run_more"]
        return values

    def without_files(self, paths: Collection[str]) -> Self:
        """Return the oracle without tests of these files and their code."""
        return replace(
            self,
            outcomes={name: one for name, one in self.outcomes.items() if name.partition("::")[0] not in paths},
            modules={path: codes for path, codes in self.modules.items() if path not in paths},
        )

    def is_exceeded_by(self, cpu_seconds: float, limit_seconds: float) -> bool:
        """Return whether a run used far more CPU time than gold runs and much of its limit, so it is not starved."""
        least = _CPU_SHARE * limit_seconds  # below half, because a run that got half of its limit is not starved
        return self.cpu_seconds is not None and cpu_seconds > max(least, _CPU_FACTOR * self.cpu_seconds)

    def early_end(self, observed: RunnerReport) -> list[Flag]:
        """Return a flag if a command succeeds, but its log does not tell of the tests' end as the gold runs' logs do.

        All processes write to the log, so an exit from the tests' process shows in it, however it is written: the last
        line is missing, or if other tests run after it, a line with a result.
        """
        if observed.exit_code != 0 or observed.top_sessions:
            return []
        has_line = self.last_line in ("", *_lines(observed.log))
        is_whole = has_line and count_printed_results(observed.log) >= self.num_results
        lacks = f"the log lacks {self.num_results} results, or {self.last_line!r}"
        return [] if is_whole else [Flag("ends before its tests", lacks)]

    @property
    def passed(self) -> list[str]:
        """The tests that passed in every gold run."""
        return [name for name, outcome in self.outcomes.items() if outcome == "passed"]

    def only(self, selected: Collection[str]) -> "Oracle":
        """Return the oracle of runs of the selected tests alone. `selected`: digests of names."""
        outcomes = {name: outcome for name, outcome in self.outcomes.items() if name_digest(name) in selected}
        return replace(self, outcomes=outcomes)


def merge_oracles(oracles: Sequence[Oracle]) -> Oracle:
    """Return what several gold runs have in common."""
    first, *others = oracles

    def same(name: str) -> bool:
        return all(getattr(other, name) == getattr(first, name) for other in others)

    return Oracle(
        outcomes={
            name: outcome
            for name, outcome in first.outcomes.items()
            if all(other.outcomes.get(name) == outcome for other in others)
        },
        num_sessions=first.num_sessions if same("num_sessions") else None,
        exit_code=first.exit_code if same("exit_code") else None,
        cpu_seconds=max((one.cpu_seconds for one in oracles if one.cpu_seconds is not None), default=None),
        canaries=tuple(sorted({canary for oracle in oracles for canary in oracle.canaries})),
        last_line=first.last_line if same("last_line") else "",
        num_results=min(one.num_results for one in oracles),
        modules={
            path: [code for code in codes if all(code in other.modules.get(path, ()) for other in others)]
            for path, codes in first.modules.items()
        },
    )


def _lines(log: str) -> list[str]:
    """Return the lines that are not blank, without their digits, which are times and counts."""
    return [re.sub(r"[0-9]+", "0", line.strip())[:_MAX_LINE] for line in log.splitlines() if line.strip()]


def module_codes(observed: RunnerReport) -> dict[str, frozenset[str]]:
    """Return test file → digests of the code that its tests run, of all sessions that were not started by tests."""
    sessions = [*observed.top_sessions, *observed.workers]
    return {path: module.codes for session in sessions for path, module in session.modules.items()}


def name_digest(node_id: str) -> str:
    """Return the digest of a test's name without parameters, with which the witness begins digests of its code."""
    path, colons, name = node_id.partition("::")
    name = path + colons + name.partition("[")[0]
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_NAME_DIGITS]


def is_code_missing(codes: Sequence[str], found: Collection[str], names: Collection[str]) -> bool:
    """Return whether a test that ran did not run code that it ran with the gold patch.

    `codes`, `found`: digests of a test file's code with the gold patch and now. `names`: digests of the names of tests
    that ran. More code, of tests that the gold patch's run did not have, is no difference; which tests have to pass is
    decided by their outcomes.
    """
    return any(code not in found for code in codes if code[:_NAME_DIGITS] in names)


def session_canary(session: RunnerSession, observed: RunnerReport) -> str:
    """Return the result of a session's canary: `failed` is correct. Under xdist it is the worst of the workers'."""
    if session.canary != "none" or not observed.workers:
        return session.canary
    results = {worker.canary for worker in observed.workers if worker.exit is not None}
    return next((result for result in ("passed", "unsupported", "failed") if result in results), "none")
