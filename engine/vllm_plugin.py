"""vLLM plug-ins in every process of vLLM: the weight-transfer backend `disk`, and what an engine on a CPU needs.

vLLM calls `register_weight_backend` and `adapt_to_cpu` through the entry point group `vllm.general_plugins`.
`--weight-transfer-config` selects the backend, which is in `engine/vllm_weight_transfer.py`;
`--enable-return-routed-experts` selects the worker of `engine/vllm_cpu_worker.py`. This module is also imported by
processes without vLLM, so it imports vLLM only on call; that import takes ten seconds.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine import adapter_files
from engine.policy_files import file_sha256

BACKEND = "disk"
WORKER_EXTENSION = "engine.vllm_worker_extension.WeightFileChecks"
_RECENT_SECONDS = 1.0
_SHORT_MS = 1


def register_weight_backend() -> None:
    """Register the backend. vLLM calls this several times per process, and refuses to register a name twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "engine.vllm_weight_transfer", "DiskWeightTransferEngine")


@cache
def adapt_to_cpu() -> None:
    """On a CPU, replace vLLM's refusal of `--enable-return-routed-experts` by a worker that can return them, let its
    processes sleep while they wait for each other, and give one process one gloo group."""
    from vllm.config import VllmConfig
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = _use_experts_worker
        SpinCondition.wait = sleeping_wait(SpinCondition.wait)
        _share_group_of_one()


def sleeping_wait(wait: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> Callable[..., None]:
    """Return vLLM's wait for another of its processes without its polling of shared memory for a second after each
    read, which during each step takes a core of those that compute it.

    In that second it sleeps for a millisecond at most, because the second of two messages within a millisecond does not
    wake the process that waits.
    """

    def sleep(condition: Any, timeout_ms: int | None = None) -> None:
        is_recent = clock() < condition.last_read + _RECENT_SECONDS
        condition.busy_loop_s = 0
        wait(condition, _SHORT_MS if is_recent else timeout_ms)

    return sleep


def _share_group_of_one() -> None:
    """Make the groups of a world of one process the same group.

    vLLM makes a dozen, and the thread of each gloo group wakes 100 times a second: together 1.2% of a core.
    """
    import torch.distributed as dist

    make, destroy, shared = dist.new_group, dist.destroy_process_group, list[Any]()

    def new_group(*args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size() > 1:
            return make(*args, **kwargs)
        if not shared:
            shared.append(make(*args, **kwargs))
        return shared[0]

    def destroy_process_group(group: Any = None) -> None:
        if group not in shared:  # it ends with the process
            destroy(group)

    dist.new_group = new_group
    dist.destroy_process_group = destroy_process_group


def _use_experts_worker(vllm_config: Any) -> None:
    """Choose the worker, if experts are to be returned. Raises ValueError for a config in which they would be wrong."""
    if not vllm_config.aux_output_config.enabled:
        return
    if not vllm_config.model_config.is_moe:
        raise ValueError("--enable-return-routed-experts: the model has no experts; leave training.router_replay out")
    if not vllm_config.model_config.enforce_eager:  # a compiled graph would leave out what records them
        raise ValueError("--enable-return-routed-experts on a CPU needs --enforce-eager; add it to engine.args")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError("--enable-return-routed-experts needs prefix caching; leave --no-enable-prefix-caching out")
    vllm_config.parallel_config.worker_cls = "engine.vllm_cpu_worker.ExpertsWorker"


def checked_paths(
    root: Path, files: Sequence[str], sha256: Sequence[str], digest_of: Callable[[Path], str] = file_sha256
) -> list[Path]:
    """Return the real paths of weight files, after checking all of them before any is loaded.

    Raises ValueError naming the first file that lies outside of `root`, is neither a safetensors file nor one of an
    adapter's two configs, or has another digest.
    """
    if not files or len(files) != len(sha256):
        raise ValueError(
            f"a weight update names {len(files)} files and {len(sha256)} digests; "
            "expected as many of each, at least one"
        )
    base = root.resolve()
    paths = [(base / name).resolve() for name in files]
    for name, path in zip(files, paths, strict=True):
        is_known = path.suffix == ".safetensors" or path.name in (adapter_files.CONFIG, adapter_files.BASE)
        if not path.is_relative_to(base) or not is_known:
            raise ValueError(f"weight file {name!r} is no safetensors file below {base}")
    for name, path, expected in zip(files, paths, sha256, strict=True):
        found = digest_of(path)
        if found != expected:
            raise ValueError(f"weight file {name!r} has sha256 {found}, expected {expected}; no weight was changed")
    return paths


def read_tensors(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of all files, with one tensor in memory at a time."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
