"""Files of rollouts are delayed by any error, which is said once."""

from stack.rollout_dumps import _Dumps
from tests.standins.failing_database import FailingDatabase


async def test_any_error_is_said_once() -> None:
    said: list[str] = []
    async with FailingDatabase("postgresql://127.0.0.1:1/none") as database:
        database.num_failures = 2
        dumps = _Dumps(database, "run", "{rollout}", said.append)
        await dumps.try_look()
        await dumps.try_look()
    assert said == ["rollouts are not dumped: the root certificate file does not exist"]
