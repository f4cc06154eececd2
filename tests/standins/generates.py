"""Generate functions of a user, named in a config by their import paths."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import httpx


async def by_hand(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """An agent that lives in the worker: it runs what the model says in one box after another, and takes the last."""
    rollout = args.rollout
    messages = [{"role": "user", "content": f"{sample.label}: {sample.prompt} in {sample.metadata['workdir']}"}]
    async with httpx.AsyncClient(trust_env=False, timeout=120, base_url=rollout.base_url) as http:
        async with rollout.sandbox() as box:
            await box.exec("echo draft > draft.txt", cwd=sample.metadata["workdir"])
        async with rollout.sandbox() as box:
            for _ in range(2):
                body = {"model": "policy", "messages": messages, "max_tokens": sampling_params["max_new_tokens"]}
                answer = await http.post(
                    "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {rollout.api_key}"}
                )
                message = answer.raise_for_status().json()["choices"][0]["message"]
                done = await box.exec(message["content"], cwd=sample.metadata["workdir"], check=False)
                messages += [message, {"role": "user", "content": done.stdout or "nothing"}]
            await box.write_file(f"{sample.metadata['workdir']}/b.txt", str(args.n_samples_per_prompt))
            assert b"b.txt" in await rollout.git_diff(box)
    return await rollout.samples()


async def alters(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Returns a sample with a token of the prompt in its loss, one that was made up, and the recorded one as a list."""
    rollout = args.rollout
    async with rollout.sandbox() as box:
        await rollout.run_agent(box)
        await rollout.git_diff(box)
    assert (await rollout.grade()).solved
    altered, kept = (await rollout.samples())[0], (await rollout.samples())[0]
    altered.loss_mask[:] = 1
    altered.reward = 0.7
    made_up = SimpleNamespace(tokens=[1, 2, 3], loss_mask=[1, 1, 1], rollout_log_probs=[0.0, 0.0, 0.0])
    return [altered, made_up, *([kept] if sample.metadata.get("keeps") else [])]


async def makes_no_call(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    async with args.rollout.sandbox() as box:
        await args.rollout.git_diff(box)
    return await args.rollout.samples()


async def breaks(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return dataclasses.replace(sample, tokens=[])
