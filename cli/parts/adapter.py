"""`ratchet adapter`: run the adapter."""

from stack.parts import Stack
from stack.serving_plan import load_plan


def adapter() -> None:
    """Run the adapter, the model API that agents call instead of their vendor's."""
    from adapter.app import run_adapter
    from adapter.settings import AdapterSettings
    from ratchet.temporal_settings import load_temporal_settings

    stack = Stack()
    plan = load_plan(stack)
    environment = stack.environment()
    run_adapter(
        AdapterSettings(
            model_path=plan.model_path,
            database_url=environment["RATCHET_DATABASE_URL"],
            host=environment["ADAPTER_BIND_HOST"],
            port=int(environment["ADAPTER_PORT"]),
            tool_parser=plan.config.engine.tool_parser,
            reasoning_parser=plan.config.engine.reasoning_parser,
            template_kwargs=plan.config.engine.chat_template_kwargs,
            restore_reasoning=plan.config.engine.restore_reasoning,
            images=plan.config.engine.images,
            pool_size=load_temporal_settings().postgres.adapter_pool_size,
        )
    )
