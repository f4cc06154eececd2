"""The kernel's setting of transparent huge pages, and what helps processes that get small pages only.

Without huge pages the processor looks an address up for every 4 KiB; a virtual machine looks it up twice.
"""

from collections.abc import Mapping
from pathlib import Path

from ratchet.start_variables import uses_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COST = "memory access can cost several times as much without them, most of all on a virtual machine"


def kernel_setting(path: Path = _SETTING) -> str:
    """Return the chosen word of the kernel's file: `always`, `madvise` or `never`; empty if there is no such file."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def advice(setting: str, environment: Mapping[str, str]) -> str:
    """Return what helps processes with this environment; empty if they get huge pages, or the kernel has none."""
    if setting == "never":
        return (
            f"transparent huge pages: never; {_COST}; `echo madvise > {_SETTING}` gives them to processes that ask, as "
            "ours do"
        )
    if setting == "madvise" and not uses_huge_pages(environment):
        return (
            f"transparent huge pages: madvise, and GLIBC_TUNABLES or the C library keeps our parts from them; {_COST}; "
            f"`echo always > {_SETTING}` helps"
        )
    return ""
