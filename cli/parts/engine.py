"""`ratchet engine`: run one vLLM server and supervise it."""

import asyncio

from ratchet import paths
from stack.parts import Stack
from stack.serving_plan import load_plan


def engine() -> None:
    """Run vLLM on the newest published policy and keep its registration and weights current."""
    from engine.process import EngineSettings
    from engine.wrapper import run_engine

    stack = Stack()
    plan = load_plan(stack)
    paths.policies().mkdir(parents=True, exist_ok=True)
    engine = plan.config.engine
    asyncio.run(
        run_engine(
            EngineSettings(
                model_path=plan.model_path,
                port=stack.ports["engine"],
                database_url=stack.environment()["RATCHET_DATABASE_URL"],
                state_dir=stack.home,
                policies_root=paths.policies(),
                dtype=engine.dtype,
                max_model_len=plan.config.sampling.max_context_tokens,
                max_num_seqs=engine.max_num_seqs,
                kv_cache_gib=engine.kv_cache_gib,
                num_threads=engine.num_threads,
                extra_args=tuple(engine.args),
            )
        )
    )
