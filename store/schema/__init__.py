"""The tables. Import them from here.

Constraints enforce the main promises: a rollout has a reward exactly if it has a verdict, and a group enters one step.
Token arrays are bytea: little-endian int32 ids, float32 logprobs (`store.arrays`). Times are timestamptz, set
by Postgres `now()`. States are text columns with the values of `ratchet.types`."""

from store.schema.base import Base as Base
from store.schema.rollouts import *  # noqa: F403
from store.schema.runs import *  # noqa: F403
from store.schema.tasks import *  # noqa: F403
