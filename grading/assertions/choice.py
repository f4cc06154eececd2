"""Choose which assertions of a task's tests are changed: those at which the task's tests fail without a solution."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from grading.assertions.site import AssertionSite

_MAX_EDITS = 60
_KINDS = ("value", "refused", "negation", "failure")
_WRONG_VALUES = ("value", "refused")
_TRIES = 12
"""The number of tries. The last six use other places and kinds of edits, because the preferred ones have had no
effect."""

Sites = dict[str, list[AssertionSite]]
"""Target of an edit → its assertions."""


class _Rank(NamedTuple):
    """The order of preference of edits; the least one is the best."""

    is_weak: bool
    place: int
    kind: int


class _Place(NamedTuple):
    rank: _Rank
    target: str
    site: AssertionSite


def failing_lines(mentions: Iterable[str], name: str) -> frozenset[int]:
    """Return the lines of a file that a log names. `mentions`: `NAME:LINE` each, with the file's name only."""
    own = name.rpartition("/")[2] + ":"
    return frozenset(int(one.removeprefix(own)) for one in mentions if one.startswith(own))


def _rank_all(sites: Sequence[AssertionSite], lines: Collection[int]) -> list[_Rank]:
    """Return the rank of each assertion of a test or file. `lines`: those that a run without a solution names.

    A run without a solution satisfies what precedes the assertion at which it fails, so that a control run that changes
    one of these shows nothing of the solution. A wrong value is preferred to a negated assertion, which is also passed
    by what equals everything.
    """
    last = max((site.last_line for site in sites), default=0)
    reached = max((line for line in lines if line <= last), default=0)
    return [_rank(site, lines, reached) for site in sites]


def _rank(site: AssertionSite, lines: Collection[int], reached: int) -> _Rank:
    is_here = any(line in lines for line in range(site.first_line, site.last_line + 1))
    place = 0 if is_here else 1 if site.first_line > reached else 2
    return _Rank(site.kind not in _WRONG_VALUES, place, _KINDS.index(site.kind))


def _preferred(sites: Sequence[AssertionSite], lines: Collection[int], number: int) -> list[AssertionSite]:
    """Return the preferred ones of a test's assertions, for this number of the try."""
    ranks = _rank_all(sites, lines)
    distinct = sorted(set(ranks))
    fallback = max(0, number % _TRIES - (_TRIES - 6)) // 2
    wanted = distinct[min(fallback, len(distinct) - 1)]
    return [site for site, rank in zip(sites, ranks, strict=True) if rank == wanted]


def choose_for_each(
    sites: Sequence[AssertionSite], lines: Collection[int], wanted: set[str], rng: random.Random, number: int
) -> list[AssertionSite]:
    """Choose one site for each wanted function, or for every one if none is wanted; without functions half of all."""
    by_function: dict[str, list[AssertionSite]] = {}
    for site in sites:
        by_function.setdefault(site.function, []).append(site)
    chosen: list[AssertionSite] = []
    for function, own in by_function.items():
        preferred = _preferred(own, lines, number)
        if not function:
            chosen += rng.sample(preferred, min(_MAX_EDITS, (len(preferred) + 1) // 2))
        elif function in wanted or not wanted:
            chosen.append(rng.choice(preferred))
    return _without_overlaps(chosen)


def choose_single(
    sites: Mapping[str, Sequence[AssertionSite]], lines: Mapping[str, Collection[int]], number: int
) -> Sites:
    """Choose one site, another one for each number: first where the tests fail without a solution, then others, which
    that failure hides, in a random order."""
    places = [
        _Place(rank, target, site)
        for target, found in sites.items()
        for rank, site in zip(_rank_all(found, lines[target]), found, strict=True)
    ]
    if not places:
        return {}
    random.Random(len(places)).shuffle(places)
    places.sort(key=lambda place: place.rank)
    best = places[0].rank
    used = [one for one in places if one.rank.is_weak == best.is_weak and one.rank.place <= max(1, best.place)]
    chosen = used[number % len(used)]
    return {chosen.target: [chosen.site]}


def _without_overlaps(sites: Iterable[AssertionSite]) -> list[AssertionSite]:
    kept: list[AssertionSite] = []
    for site in sorted(sites, key=lambda site: (site.start, site.end)):
        if not kept or site.start >= kept[-1].end:
            kept.append(site)
    return kept


def prefer_unknown(
    sites: Mapping[str, list[AssertionSite]], sources: Mapping[str, bytes], known: Mapping[str, bytes], wanted: set[str]
) -> Sites:
    """Drop the sites on lines of the known sources, but not all of a wanted function, nor all there are."""
    kept: Sites = {}
    for target, found in sites.items():
        lines = {line.strip() for line in known.get(target, b"").splitlines()}
        new = [site for site in found if _line_of(sources[target], site.start).strip() not in lines]
        missing = wanted - {site.function for site in new}
        kept[target] = [site for site in found if site in new or site.function in missing]
    return kept if any(kept.values()) else dict(sites)


def _line_of(source: bytes, at: int) -> bytes:
    end = source.find(b"\n", at)
    return source[source.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(source)]
