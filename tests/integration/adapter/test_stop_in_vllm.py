"""Stop sequences and streams of the real vLLM change neither tokens nor logprobs before the end.

A minute on idle cores, most of it the server's start; `make slow` runs it.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.vllm_parsers import VllmParsers
from engine.client import EngineClient
from engine.generate_request import IdsText, Sampling
from engine.generation import SampledTokens
from stack.ports import free_port
from tests.standins.tiny_model import make_tokenizer, make_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OPTIONS = (
    "--served-model-name", "policy", "--enable-scale-out", "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "512", "--max-num-seqs", "4", "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1",
)  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    make_tokenizer(tmp_path)
    make_weights(tmp_path, scale=0.3)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), *OPTIONS]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        async with asyncio.timeout(1500), EngineClient(f"http://127.0.0.1:{port}") as client:
            while not await client.health():
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                await asyncio.sleep(0.5)
            yield client
    finally:
        process.terminate()
        process.wait()


async def test_a_stop_sequence_and_a_stream_change_nothing_before_the_end(client: EngineClient, tmp_path: Path) -> None:
    renderer = Renderer(tmp_path)
    outputs = OutputParser(renderer, VllmParsers(tmp_path, None, None))
    prompt = renderer.tokenizer.encode("if message.content is")
    for seed in range(8):
        whole = await client.generate(prompt, Sampling(60, 1.0, renderer.stop_ids, seed), f"whole-{seed}")
        text = outputs.decode(whole.token_ids)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        expected = await outputs.num_ids_until_stop(whole.token_ids, [stop])
        sampling = Sampling(60, 1.0, renderer.stop_ids, seed, stop=(stop,))
        stopped = await client.generate(prompt, sampling, f"stopped-{seed}")
        number = await outputs.num_ids_until_stop(stopped.token_ids, [stop])
        assert number == expected <= len(stopped.token_ids) <= expected + 4
        assert np.array_equal(stopped.token_ids[:number], whole.token_ids[:number])
        assert np.allclose(stopped.logprobs[:number], whole.logprobs[:number], atol=1e-4)
        assert stopped.cut(number).logprobs_valid
        seen: list[int] = []
        streamed = SampledTokens(seen.extend)
        asked = Sampling(60, 1.0, renderer.stop_ids, seed)
        await client.stream(IdsText.of(prompt), asked, f"streamed-{seed}", None, streamed)
        found = streamed.generation()
        assert seen == found.token_ids.tolist() == whole.token_ids.tolist() and found.logprobs_valid
        assert np.allclose(found.logprobs, whole.logprobs, atol=1e-4)
        assert (found.finish_reason, found.version_spans) == (whole.finish_reason, whole.version_spans)
