"""A method that vLLM's workers get for /collective_rpc (`--worker-extension-cls`): check files before an update.

vLLM has no route on which a weight-transfer backend answers, and an update that computes the digests of gigabytes
keeps vLLM paused for as long.
"""

from collections.abc import Sequence
from typing import Any

from engine.vllm_lora_experts import leave_out_experts

leave_out_experts()  # here, because a worker imports this module before it makes the model


class WeightFileChecks:
    """Added to the bases of vLLM's worker class, on GPUs and on a CPU."""

    weight_transfer_engine: Any

    def check_weight_files(self, name: str, files: Sequence[str], sha256: Sequence[str]) -> dict[str, Any]:
        """Begin to compare the digests in a thread, unless this check has begun. Return {"done", "error"}.

        It raises nothing: vLLM 0.32 would take the answers of its other workers for those of the next call.
        """
        try:
            found: dict[str, Any] = self.weight_transfer_engine.check(name, files, sha256)
        except Exception as error:
            return {"done": True, "error": repr(error)}
        return found
