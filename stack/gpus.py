"""The GPUs of this machine that this process may use."""

import functools
import os
import shutil
import subprocess

_VARIABLE = "CUDA_VISIBLE_DEVICES"


@functools.cache
def _installed_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def usable_gpus() -> list[str]:
    """Return CUDA's names of the GPUs in order of their index here: all, or those of CUDA_VISIBLE_DEVICES.

    A batch system sets the variable for its job, and index 0 of the config is then the first of the job's GPUs.
    """
    allowed = os.environ.get(_VARIABLE)
    if allowed is None:
        return [str(gpu) for gpu in range(_installed_gpus())]
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names


def visible_devices(gpus: tuple[int, ...], is_here: bool = True) -> dict[str, str]:
    """Return the variable that shows a process only these GPUs, of this machine or of another host."""
    names = usable_gpus() if is_here else []
    return {_VARIABLE: ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus)}
