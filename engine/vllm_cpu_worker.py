"""vLLM's worker on a CPU, which also returns the experts that were chosen for each token.

vLLM 0.32 does so in its second model runner only, whose kernels need a Triton with a CPU back end; PyPI has none. This
worker gives the first model runner the same steps around a forward pass. `engine/vllm_plugin.py` selects it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class ExpertsModelRunner(CPUModelRunner):  # type: ignore[misc]
    """Record the experts of each step in vLLM's connector, and add what it returns to the step's output."""

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> None:
        """Bind the connector to the routers; the blocks of its store are those of the KV cache."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **more)
        self.pending_experts: PendingAuxOutput | None = None
        if not is_profiling:
            self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run the forward pass, and copy the experts that it chose."""
        self.experts.begin_step(scheduler_output.aux_output_connector_metadata)
        found = super().execute_model(scheduler_output, intermediate_tensors)
        if found is None:  # a forward pass, whose tokens are sampled next
            number = self.input_batch.num_reqs
            batch: Any = SimpleNamespace(
                req_ids=list(self.input_batch.req_ids),
                query_start_loc_np=self.query_start_loc.np[: number + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:number].copy(),
            )
            self.pending_experts = self.experts.prepare_output(batch)
        return found

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and add the experts of the requests that have got a token."""
        output = super().sample_tokens(grammar_output)
        pending = self.pending_experts
        self.pending_experts = None
        if pending is not None:
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, num_rejected=np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class ExpertsWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with the model runner above."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = ExpertsModelRunner(self.vllm_config, torch.device("cpu"))
