"""indexes for the pages of the viewer"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_rollout_run_id_id": ("rollout", ["run_id", "id"], None),
    "ix_rollout_verdicts": ("rollout", ["run_id", "purpose", "outcome", "agent_exit", "reward"], None),
    "ix_grade_flagged": ("grade", ["rollout_id"], "jsonb_array_length(flags) > 0 OR rejected"),
}


def upgrade() -> None:
    # As in 0005: built beside the statements of a running stack, after the rest of an interrupted build is dropped.
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        for name, (table, columns, condition) in _INDEXES.items():
            op.drop_index(name, table_name=table, postgresql_concurrently=True, if_exists=True)
            where = sa.text(condition) if condition else None
            op.create_index(name, table, columns, postgresql_concurrently=True, postgresql_where=where)
        op.execute("SET lock_timeout = '5s'")


def downgrade() -> None:
    for name, (table, _, _) in _INDEXES.items():
        op.drop_index(name, table_name=table)
