"""The real vLLM makes its span a child of the request to it. `make slow` runs this; vLLM starts once."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from engine.client import GENERATE, EngineClient
from engine.generate_request import IdsText, Sampling, generate_body
from engine.process import vllm_process
from tests.cpu_vllm import cpu_settings, wait_until_healthy
from tests.standins.collector import Collector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_vllms_span_is_a_child_of_the_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        settings = cpu_settings(model, tmp_path)
        body = generate_body(IdsText.of([1, 2, 3]), Sampling(max_tokens=4, temperature=1.0), "turn-1")
        async with vllm_process(settings, model) as process, EngineClient(settings.address) as client:
            await wait_until_healthy(client, process)
            headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
                answer = await http.post(settings.address + GENERATE, content=body, headers=headers)
            assert answer.is_success, answer.text
            async with asyncio.timeout(60):
                while not [one for one in collector.spans if one.trace == TRACE]:
                    await asyncio.sleep(0.2)
    [span] = [one for one in collector.spans if one.trace == TRACE]
    assert (span.parent, span.service) == (PARENT, os.environ.get("OTEL_SERVICE_NAME") or "ratchet-engine")
    assert span.name == "llm_request" and span.attributes["gen_ai.usage.completion_tokens"] == 4
