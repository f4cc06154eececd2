"""vLLM plug-in: the weight-transfer backend `disk`, which loads published policy files into the running engine, or takes them over NCCL.

Why here: it is the engine's half of `engine/policy_files.py` and works wherever the files are visible, with or without a GPU; and of
`training/weight_broadcast.py`, by vLLM's own NCCL receiver, which has not run on a GPU here yet. One engine needs both: what it missed, it reads.
Called by: vLLM itself (entry point group `vllm.general_plugins`), once in every process; `--weight-transfer-config` names the backend.

    init   {"root": DIR, "nccl": {...}}                    the directory below which policies are published; a group to join, or none
    update {"files": [relative], "sha256": [hex]}          all digests first, then all tensors of the model
           {"names": [], "dtype_names": [], "shapes": []}  from rank 0 of the group, in this order
    start, finish                                          nothing here; vLLM opens and closes the update and sets the label
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BACKEND = "disk"
_CHUNK_BYTES = 8 << 20


def register_weight_backend() -> None:
    """Entry point. vLLM calls it more than once per process; a second registration would be an error there."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


def checked_paths(root: Path, files: Sequence[str], sha256: Sequence[str]) -> list[Path]:
    """The files' real paths, once each lies below `root` and has its digest. Raises ValueError naming the first that does not."""
    if not files or len(files) != len(sha256):
        raise ValueError(
            f"a weight update names {len(files)} files and {len(sha256)} digests; expected as many of each, at least one"
        )
    base = root.resolve()
    paths = [(base / name).resolve() for name in files]
    for name, path in zip(files, paths, strict=True):
        if not path.is_relative_to(base) or path.suffix != ".safetensors":
            raise ValueError(f"weight file {name!r} is no safetensors file below {base}")
    for name, path, expected in zip(files, paths, sha256, strict=True):
        found = file_sha256(path)
        if found != expected:
            raise ValueError(f"weight file {name!r} has sha256 {found}, expected {expected}; no weight was changed")
    return paths


def file_sha256(path: Path) -> str:
    """Hex digest, read in pieces: a shard may be larger than memory allows."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_tensors(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of all files, one tensor in memory at a time."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _engine_class() -> type[Any]:
    """The backend's class. Built on call: importing vLLM takes ten seconds, and this module is read by processes without it."""
    from dataclasses import dataclass, field

    from vllm.distributed.weight_transfer import base
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class DiskInit(base.WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not read by mypy
        root: str | None = None
        nccl: dict[str, Any] | None = None

    @dataclass
    class DiskUpdate(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        files: list[str] = field(default_factory=list)
        sha256: list[str] = field(default_factory=list)
        names: list[str] = field(default_factory=list)
        dtype_names: list[str] = field(default_factory=list)
        shapes: list[list[int]] = field(default_factory=list)

    class DiskWeightTransferEngine(base.WeightTransferEngine[DiskInit, DiskUpdate]):  # type: ignore[misc]
        init_info_cls = DiskInit
        update_info_cls = DiskUpdate
        _root: Path | None = None
        _nccl: Any = None

        def init_transfer_engine(self, init_info: DiskInit) -> None:
            self._leave_group()
            if init_info.root is not None:
                self._root = Path(init_info.root)
            if init_info.nccl is not None:
                from vllm.distributed.weight_transfer import nccl_engine

                receiver = nccl_engine.NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)
                receiver.init_transfer_engine(nccl_engine.NCCLWeightTransferInitInfo(**init_info.nccl))
                self._nccl = receiver

        def start_weight_update(self) -> None:
            """Nothing yet: layer-wise reloading takes the parameters away, and a refused update must leave them in place."""

        def receive_weights(self, update_info: DiskUpdate) -> None:
            if update_info.names:
                self._receive(update_info)
                return
            if self._root is None:
                raise ValueError("no root directory: call /init_weight_transfer_engine first")
            paths = checked_paths(self._root, update_info.files, update_info.sha256)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(read_tensors(paths))
            # Finalised here and not in `finish`: whoever drives the update may die in between, and the engine must stay usable.
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied(self.model)

        def _receive(self, update_info: DiskUpdate) -> None:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

            if self._nccl is None:
                raise ValueError("this engine is in no NCCL group: call /init_weight_transfer_engine with one first")
            info = NCCLWeightTransferUpdateInfo(update_info.names, update_info.dtype_names, update_info.shapes)
            self._nccl.start_weight_update()
            try:
                self._nccl.receive_weights(info)
            finally:
                self._nccl.finish_weight_update()  # layers left open would take the next file's tensors for their missing parts

        def finish_weight_update(self) -> None:
            """Nothing left to do; vLLM takes over the version label."""

        def shutdown(self) -> None:
            self._root = None
            self._leave_group()

        def _leave_group(self) -> None:
            if self._nccl is not None:
                self._nccl.shutdown()
                self._nccl = None

    return DiskWeightTransferEngine


def _repack_tied(model: Any) -> None:
    """On a CPU, gives an output layer that shares the embedding's weights a fresh packed copy of them.

    vLLM packs linear weights for its CPU kernels and repacks a layer when the checkpoint has tensors for it. A tied `lm_head` has
    none, so it would go on computing logits with the first weights (0.5 in logprob on a small Qwen3, found by comparing with
    transformers). Layer-wise reloading of vLLM 0.32 does not know the case.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
