"""`ratchet adapter`: run the adapter."""

from typing import TYPE_CHECKING

from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.serving_plan import load_plan

if TYPE_CHECKING:
    from adapter.settings import AdapterSettings


def adapter() -> None:
    """Run the adapter, the model API that agents call instead of their vendor's."""
    from adapter.app import run_adapter
    from ratchet.trace_export import start_exporting

    start_exporting("adapter")
    run_adapter(settings_of_stack(Stack()))


def settings_of_stack(stack: Stack) -> "AdapterSettings":
    """Return the settings of the stack's adapter, from its serving plan, its environment and temporal.yaml."""
    from adapter.settings import AdapterSettings

    plan = next(iter(load_plan(stack).sets.values()))  # the adapter's values are equal in all sets
    environment = stack.environment()
    numbers = load_temporal_settings()
    return AdapterSettings(
        model_path=plan.model_path,
        database_url=environment["RATCHET_DATABASE_URL"],
        host=environment["ADAPTER_BIND_HOST"],
        port=int(environment["ADAPTER_PORT"]),
        tool_parser=plan.config.engine.tool_parser,
        reasoning_parser=plan.config.engine.reasoning_parser,
        template_kwargs=plan.config.engine.chat_template_kwargs,
        stop_token_ids=tuple(plan.config.engine.stop_token_ids),
        restore_reasoning=plan.config.engine.restore_reasoning,
        images=plan.config.engine.images,
        pool_size=numbers.postgres.adapter_pool_size,
        max_sessions=numbers.adapter.max_sessions,
    )
