"""The weight-transfer backend `disk` inside vLLM: load published files into the running model.

Only vLLM imports this module (`engine/vllm_plugin.py` registers it by name), so it may import vLLM at module level.
Files work wherever they are visible, with or without a GPU.

    init   {"root": DIR, "adapter": DIR or null}    root directory of all policies, directory of the first slot's
                                                    adapter in an engine with LoRA
    update {"files": [relative], "sha256": [hex],   check all digests, then load all tensors of the model or the adapter
            "slot": NUMBER}                         of a slot (1 if none is named)
    start, finish                                   no effect here; vLLM opens, closes and labels the update

Before it pauses vLLM, the caller lets every worker check the digests (`check`), over /collective_rpc, so that the
update itself computes none. An update without that check makes it itself. With vLLM's own data parallelism only the
first engine's workers are asked, and the others check at the update.

An adapter is copied to the directory of its slot, with which vLLM was started (`--lora-modules`). `finish` makes vLLM
forget the adapters of all slots, and with the next call of a slot it reads the slot's directory again. vLLM's own
/v1/load_lora_adapter with `load_inplace` is not used: vLLM 0.32 keeps that flag and the path with each call, so that it
reads the files before every forward pass, and a call in flight reads those of the version it began with, under the new
version's label.

All slots have one base. Whole weights that are the base already, such as version 0 of a run that joins, only empty
their slot; another base empties all slots.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer import base
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from engine import adapter_files
from engine.file_digests import BackgroundChecks, FileDigests
from engine.vllm_plugin import checked_paths, read_tensors
from ratchet.lora_slots import FIRST_SLOT, SERVED_RANKS


@dataclass
class DiskInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not read by mypy
    """Body of /init_weight_transfer_engine. None keeps `root` or `adapter` as before."""

    root: str | None = None
    adapter: str | None = None


@dataclass
class DiskUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of /update_weights: files with their digests."""

    files: list[str] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)
    slot: int = FIRST_SLOT


class DiskWeightTransferEngine(base.WeightTransferEngine[DiskInitInfo, DiskUpdateInfo]):  # type: ignore[misc]
    """The backend of one vLLM worker process."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo
    _root: Path | None = None
    _adapter: Path | None = None
    _base: list[str] | None = None
    """Digests of the weight files that were loaded last; None for those that vLLM has started with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._digests = FileDigests()
        self._checks = BackgroundChecks()

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        """Set the root directory."""
        if init_info.root is not None:
            self._root = Path(init_info.root)
        if init_info.adapter is not None:
            self._adapter = Path(init_info.adapter)
            _skip_adapters_of_head()

    def check(self, name: str, files: Sequence[str], sha256: Sequence[str]) -> dict[str, Any]:
        """Compare the digests of an update's files in a thread, those of an adapter's base, too, unless it is loaded.

        Return {"done", "error"} of the check of this name; the caller asks until it is done. `error`: what is wrong
        with a file, for which the update would be refused.
        """
        return self._checks.ask(name, partial(self._check_all, files, sha256))

    def _check_all(self, files: Sequence[str], sha256: Sequence[str]) -> None:
        paths = self._checked(files, sha256)
        if adapter_files.is_adapter(files):
            self._checked_base(paths[0].parent)

    def _checked(self, files: Sequence[str], sha256: Sequence[str]) -> list[Path]:
        """Return the paths of files below the root. Raises ValueError if one is not as announced."""
        return checked_paths(self._policies_root(), files, sha256, self._digests.get)

    def _policies_root(self) -> Path:
        if self._root is None:
            raise ValueError("no root directory: call /init_weight_transfer_engine first")
        return self._root

    def _checked_base(self, directory: Path) -> tuple[list[Path], list[str]] | None:
        """Return paths and digests of the base of an adapter, None if it is loaded. Raises ValueError as above."""
        base = adapter_files.read_base(directory)
        sha256 = [file["sha256"] for file in base.files]
        if sorted(sha256) == self._base:
            return None
        # resolve(): the root may be mounted elsewhere, or be a link
        root = self._policies_root().resolve()
        names = [str((base.directory / file["name"]).relative_to(root)) for file in base.files]
        return self._checked(names, sha256), sha256

    def start_weight_update(self) -> None:
        """Do nothing yet: layer-wise reloading removes the parameters, and a refused update must keep them."""

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        """Replace the model's weights. Raises ValueError, with the weights unchanged, if a file is not as announced."""
        paths = self._checked(update_info.files, update_info.sha256)
        slot = self._slot_directory(update_info.slot)
        if adapter_files.is_adapter(update_info.files):
            self._receive_adapter(paths, slot)
        elif slot is not None and sorted(update_info.sha256) == self._base:
            adapter_files.write_identity_adapter(slot, SERVED_RANKS[0])
        else:
            self._load_model(paths, update_info.sha256)

    def _slot_directory(self, slot: int) -> Path | None:
        """Return the directory of a slot's adapter, None without adapters. Raises ValueError for an unknown slot."""
        settings = self.vllm_config.lora_config
        num_slots = 1 if settings is None else settings.max_loras
        if not FIRST_SLOT <= slot < FIRST_SLOT + num_slots:
            raise ValueError(
                f"the update is for LoRA slot {slot} and this engine has {num_slots}; run `ratchet up` with the "
                "run's config"
            )
        return None if self._adapter is None else adapter_files.slot_directory(self._adapter, slot)

    def _receive_adapter(self, paths: list[Path], slot: Path | None) -> None:
        """Load the adapter's base unless it is loaded already, and place the adapter in the slot's directory.

        Raises ValueError, with the weights unchanged, if this engine cannot serve it.
        """
        settings = self.vllm_config.lora_config
        if settings is None or slot is None:
            raise ValueError("this engine was started without LoRA, so it can serve no adapter; run `ratchet up` again")
        directory = paths[0].parent
        if (rank := adapter_files.adapter_rank(directory)) > settings.max_lora_rank:
            raise ValueError(
                f"the adapter has rank {rank} and this engine serves at most {settings.max_lora_rank}; "
                "run `ratchet up` with the run's config"
            )
        if (base := self._checked_base(directory)) is not None:
            self._load_model(*base)
        adapter_files.place_adapter(paths, slot)

    def _load_model(self, paths: list[Path], sha256: list[str]) -> None:
        """Replace all weights of the model; every slot of an engine with LoRA serves them without an adapter."""
        self._base = None
        initialize_layerwise_reload(self.model)
        with _packing_experts(self.model):
            self.model.load_weights(read_tensors(paths))
            # Finalise here, not in `finish`: the process that drives the update may die in between, and the engine must
            # stay usable.
            finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)
        self._base = sorted(sha256)
        if self._adapter is not None:
            for slot in range(FIRST_SLOT, FIRST_SLOT + self.vllm_config.lora_config.max_loras):
                directory = adapter_files.slot_directory(self._adapter, slot)
                adapter_files.write_identity_adapter(directory, SERVED_RANKS[0])

    def finish_weight_update(self) -> None:
        """Do nothing more; vLLM sets the version label."""

    def shutdown(self) -> None:
        """Forget the root directory."""
        self._root = None


@contextlib.contextmanager
def _packing_experts(model: Any) -> Iterator[None]:
    """On a CPU, let vLLM pad and pack the experts that are loaded in the block as it does when it starts.

    vLLM 0.32 does it only while a layer has no kernel yet, so that an update would leave plain weights to a kernel that
    reads packed ones (0.39 in logprob on a small Qwen3.5-MoE), and fail for experts that have to be padded. The kernels
    are put back afterwards: they refer to the tensors into which layer-wise reloading copies its result.
    """
    kernels = {}
    if current_platform.is_cpu():
        methods = (getattr(layer, "quant_method", None) for layer in model.modules())
        kernels = {one: one.moe_kernel for one in methods if isinstance(one, UnquantizedFusedMoEMethod)}
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            method.moe_kernel = kernel


def _skip_adapters_of_head() -> None:
    """On a CPU, leave out the adapters of the output layer, which no version has.

    vLLM 0.32 takes one index per request for them, also for the many rows of a prompt whose logprobs are asked for. So
    a canary that is scored beside other calls would end the engine, if the model's output layer has its own weights.
    """
    if current_platform.is_cpu():
        PunicaWrapperCPU.add_lora_logits = lambda *args, **kwargs: None


def _repack_tied_head(model: Any) -> None:
    """On a CPU, give an output layer that shares the embedding's weights a new packed copy of them.

    vLLM packs linear weights for its CPU kernels and repacks a layer when the checkpoint has tensors for it. A tied
    `lm_head` has none, so it would compute logits with the first weights for ever (0.5 in logprob on a small Qwen3,
    found by comparing with transformers). Layer-wise reloading of vLLM 0.32 does not handle this case.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
