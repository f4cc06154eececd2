"""The kernel's setting of transparent huge pages, and what small pages cost on this machine.

Without huge pages the processor looks an address up for every 4 KiB; a virtual machine looks it up twice.
"""

import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.start_variables import uses_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HIGHEST_COST = 1.2
_BYTES = 64 << 20
_PAGE_BYTES = 4096
_STEPS = 50_000
_ROUNDS = 3


@dataclass(slots=True, frozen=True)
class HugePages:
    """`setting`: `always`, `madvise` or `never`; empty if the kernel has none. `cost`: the time of random access to
    small pages in multiples of that to huge pages; 1 if it was not measured.
    """

    setting: str
    cost: float

    def advice(self, environment: Mapping[str, str]) -> str:
        """Return what small pages cost a process with this environment and what helps; empty if they cost at most a
        fifth.
        """
        if self.setting == "never":
            return (
                "transparent huge pages: never; memory access can cost several times as much without them, most of all "
                f"on a virtual machine; `echo madvise > {_SETTING}` gives them to processes that ask, as ours do"
            )
        if self.cost <= _HIGHEST_COST:
            return ""
        uses = uses_huge_pages(environment)
        return (
            f"transparent huge pages: {self.setting}; memory access costs {self.cost:.1f} times as much here without "
            f"them; {'our parts use them' if uses else 'GLIBC_TUNABLES or the C library keeps our parts from them'}; "
            f"`echo always > {_SETTING}` helps {'the rest' if uses else 'all'}"
        )


def kernel_setting(path: Path = _SETTING) -> str:
    """Return the chosen word of the kernel's file; empty if there is no such file."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def probe_huge_pages() -> HugePages:
    """Measure the cost of small pages, in well under a second, if processes use huge pages on request only."""
    setting = kernel_setting()
    if setting != "madvise":
        return HugePages(setting, 1.0)
    small, huge = _pages(mmap.MADV_NOHUGEPAGE), _pages(mmap.MADV_HUGEPAGE)
    seconds = [(_walk_seconds(small), _walk_seconds(huge)) for _ in range(_ROUNDS)]
    return HugePages(setting, min(one for one, _ in seconds) / min(one for _, one in seconds))


def _pages(advice: int) -> memoryview:
    """Return zeros in memory of this process whose pages all exist."""
    pages = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(advice)
    pages[::_PAGE_BYTES] = bytes(_BYTES // _PAGE_BYTES)
    return memoryview(pages).cast("Q")


def _walk_seconds(numbers: memoryview) -> float:
    """Return the CPU time of a random walk. Each step adds what it has read, so that the next one waits for it."""
    at, mask = 1, len(numbers) - 1
    started = time.thread_time()
    for _ in range(_STEPS):
        at = (at * 1103515245 + 12345 + numbers[at]) & mask
    return time.thread_time() - started
