"""`ratchet part adapter`: run the adapter."""

from typing import TYPE_CHECKING

from ratchet.errors import MachineError
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.serving_plan import ServingPlan, load_plan

if TYPE_CHECKING:
    from adapter.settings import AdapterSettings


def adapter() -> None:
    """Run the adapter, the model API that agents call instead of their vendor's."""
    from adapter.app import run_adapter
    from ratchet.trace_export import start_exporting

    start_exporting("adapter")
    sets = SettingsOfSets(Stack())
    run_adapter(next(iter(sets.read().values())), sets.read)


class SettingsOfSets:
    """The settings of the engine sets that a stack serves; its plan is read again whenever `ratchet up` replaces it."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._written: tuple[int, int] | None = None  # inode and time of the file
        self._settings: dict[str, AdapterSettings] = {}

    def read(self) -> "dict[str, AdapterSettings]":
        """Return engine set → settings; the same mapping for as long as the plan stays.

        Raises MachineError at the first call if there is no plan.
        """
        try:
            status = self._stack.plan_path.stat()
            written = (status.st_ino, status.st_mtime_ns)
        except OSError:
            written = None
        if written != self._written or not self._settings:
            self._written = written
            try:
                plan = load_plan(self._stack)
            except MachineError:
                if not self._settings:
                    raise
                return self._settings  # it was deleted, or nothing is to be served for now
            self._settings = {name: settings_of_plan(self._stack, one) for name, one in plan.sets.items()}
        return self._settings


def settings_of_plan(stack: Stack, plan: ServingPlan) -> "AdapterSettings":
    """Return the adapter's settings for one engine set, from its plan, the stack's environment and temporal.yaml."""
    from adapter.settings import AdapterSettings

    environment = stack.environment()
    numbers = load_temporal_settings()
    return AdapterSettings(
        model_path=plan.model_path,
        database_url=environment["RATCHET_DATABASE_URL"],
        host=environment["ADAPTER_BIND_HOST"],
        port=int(environment["ADAPTER_PORT"]),
        pool_size=numbers.postgres.adapter_pool_size,
        max_sessions=numbers.adapter.max_sessions,
    ).of_model(plan.model_path, plan.config.engine)
