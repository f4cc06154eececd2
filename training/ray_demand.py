"""The demand for Ray: the learner service notes it in a file while a run wants a learner, and the part `ray` follows.

Ray's processes use CPU and memory all the time, so that they run only while ranks may.
"""

import time
from pathlib import Path

_REST_SECONDS = 600.0
"""Time after the last note after which Ray is not wanted any more; the next run may come soon."""


def _note(home: Path) -> Path:
    return home / "ray.wanted"


def note_ray_demand(home: Path) -> None:
    _note(home).touch()


def is_ray_wanted(home: Path) -> bool:
    try:
        return time.time() - _note(home).stat().st_mtime < _REST_SECONDS
    except OSError:
        return False
