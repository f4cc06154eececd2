"""The brief's flow as a function of one's own: box, agent, diff, grade, samples.

    harness: {generate: "examples.own_generate:generate"}

Change any line: what works in the box, how many boxes there are, which samples are trained.
"""

from types import SimpleNamespace
from typing import Any


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[SimpleNamespace]:
    """Return a sample per chain of the session, none of an agent that ran out of time.

    `args`: the run's values under vime's names, and `rollout` (`activities.generate.OwnRollout`). `sample`: the task's
    `prompt`, `label` and `metadata`. `sampling_params`: the adapter applies these to every call by itself.
    """
    rollout = args.rollout
    async with rollout.sandbox() as box:
        await box.write_file("/tmp/hint.md", f"An answer has at most {sampling_params['max_new_tokens']} tokens.\n")
        agent_exit = await rollout.run_agent(box)  # or calls of your own to rollout.base_url with rollout.api_key
        changed = await box.exec("git status --short", user="agent", cwd=sample.metadata["workdir"])
        await rollout.git_diff(box)
    if changed.stdout:
        await rollout.grade()
    samples: list[SimpleNamespace] = await rollout.samples()
    return [] if agent_exit == "time_budget" else samples
