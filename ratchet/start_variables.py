"""The environment variables with which our processes start. Libraries read them at the start of a process only.

OMP_WAIT_POLICY: threads of OpenMP would spin between two operations, which on busy cores takes several times the CPU
time of the work. GLIBC_TUNABLES: malloc asks the kernel for huge pages, without which memory access can cost many times
as much on a virtual machine, which translates every address twice.
"""

import os
from collections.abc import Mapping

_WAIT = "OMP_WAIT_POLICY"
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
_FIRST_GLIBC = (2, 35)


def _c_library() -> str | None:
    """Return the name and version of the C library, None if it does not tell."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):  # a system without glibc
        return None


_C_LIBRARY = _c_library()


def start_variables(environment: Mapping[str, str], c_library: str | None = _C_LIBRARY) -> dict[str, str]:
    """Return the variables with which a process of ours starts in this environment. What the user has set wins."""
    tunables = [one for one in environment.get(_TUNABLES, "").split(":") if one]
    if _has_tunable(c_library) and not any(one.startswith(f"{_HUGE_PAGES}=") for one in tunables):
        tunables.append(f"{_HUGE_PAGES}=1")
    variables = {_WAIT: environment.get(_WAIT, "PASSIVE")}
    return variables | ({_TUNABLES: ":".join(tunables)} if tunables else {})


def uses_huge_pages(environment: Mapping[str, str], c_library: str | None = _C_LIBRARY) -> bool:
    """Return whether malloc asks for huge pages in a process that has started with this environment."""
    tunables = environment.get(_TUNABLES, "").split(":")
    chosen = [one.partition("=")[2] for one in tunables if one.startswith(f"{_HUGE_PAGES}=")]
    return _has_tunable(c_library) and bool(chosen) and chosen[-1] != "0"


def _has_tunable(c_library: str | None) -> bool:
    name, _, version = (c_library or "").partition(" ")
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return name == "glibc" and tuple(numbers) >= _FIRST_GLIBC
