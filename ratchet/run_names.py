"""The names of runs, groups, rollouts and evaluations; an impossible one is refused before a service is asked."""

import re
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.errors import ConfigError

RUN_ID = re.compile(r"[A-Za-z0-9._-]+")
_ROLLOUT_NUMBER = re.compile(r"[0-9]{1,18}")
"""A larger number is no id."""
_TARGET = re.compile(
    _ROLLOUT_NUMBER.pattern + r"|/groups/\d+|([^\s/]+/)+\d+"
    r"|evaluate/[^\s/]+/[^\s/]+"
    r"|(\S+-)?rollout/\S+"  # with the installation's prefix, if it shares its namespace
)
ROW_PAGE = re.compile(r"/(group|task)s/(\d+)")
_PAGES = (
    (re.compile(r"/namespaces/[^/]+/workflows/([^/]+)(/.*)?"), r"\1"),  # of the Temporal UI
    (re.compile(r"/runs/([^/]+)/steps/(\d+)"), r"\1@\2"),
    (re.compile(r"/runs/([^/]+)(?:/(?:groups|tasks|costs|commands|versions|steering))?"), r"\1"),
    (re.compile(r"/rollouts/(\d+)(?:/(?:turns|attempts|tokens)(?:/.*)?)?"), r"\1"),
)
"""Path of a page -> the name of what it shows. A group's and a task's page has no other name than its path."""


def plain_name(text: str) -> str:
    """Return a name as the store has it: of a link to a page what the page shows, without `run/` and `#`."""
    name = text.strip().removeprefix("#")
    path = _path_of_link(name)
    shown = next((found.expand(name_of) for page, name_of in _PAGES if (found := page.fullmatch(path))), None)
    if shown is None:
        return path if ROW_PAGE.fullmatch(path) else name.removeprefix("run/")
    return unquote(shown).removeprefix("run/")


def _path_of_link(name: str) -> str:
    with suppress(ValueError):  # a host in brackets that is no address
        return urlsplit(name).path.rstrip("/") if "://" in name or name.startswith("/") else ""
    return ""


def require_run_id(text: str) -> str:
    """Return the run's id. Raises ConfigError if no run can have it."""
    name = plain_name(text)
    if not RUN_ID.fullmatch(name):
        raise ConfigError(f"{text!r} cannot be the id of a run; `ratchet show runs` lists those that there are")
    return name


def rollout_number(name: str) -> int | None:
    """Return the number of the rollout that a name gives, None if it is a workflow id."""
    return int(name) if _ROLLOUT_NUMBER.fullmatch(name) else None


def is_part_of_run(name: str) -> bool:
    """Return whether a name is that of a rollout, a group or an evaluation, and no run's."""
    return not RUN_ID.fullmatch(plain_name(name)) or plain_name(name).isdecimal()


def step_number(text: str) -> int | None:
    """Return the step that a text gives, None if it is no number or one that no step can have."""
    number = rollout_number(text)
    return number if number is not None and number <= LARGEST_INTEGER else None


def refuse_link_to_number(name: str) -> None:
    """Raise ConfigError for a link to a number of a row, in a request that changes something."""
    if "://" in name and (plain_name(name).isdecimal() or ROW_PAGE.fullmatch(plain_name(name))):
        raise ConfigError(
            f"{name!r} may be of another installation: to change something, name a rollout by its number, or a group "
            "or rollout by its workflow, such as group/RUN/3"
        )


def require_target_name(name: str) -> str:
    """Return a name of what can be changed. Raises ConfigError for one that cannot be, and a link to a number."""
    refuse_link_to_number(name)
    if not _TARGET.fullmatch(plain_name(name)):
        raise ConfigError(
            f"{name!r} names no group, rollout or evaluation: name a rollout by its number in `ratchet show rollouts`, "
            "or a workflow, such as group/RUN/3, rollout/RUN/3/0 or evaluate/RUN/start-t1"
        )
    return name


def newest_steps(steps: Sequence[int]) -> str:
    """Return a run's newest steps with weights in words, for a message about another step; empty without steps."""
    return f"its newest are {', '.join(map(str, steps))}" if steps else ""
