"""the experts that the engine chose for a turn's tokens"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_INDEX = "ix_turn_with_experts"


def upgrade() -> None:
    op.add_column("turn", sa.Column("routed_experts", sa.LargeBinary(), nullable=True), if_not_exists=True)
    # As in 0007: built beside the statements of a running stack, after the rest of an interrupted build is dropped.
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index(_INDEX, table_name="turn", postgresql_concurrently=True, if_exists=True)
        where = sa.text("routed_experts IS NOT NULL")
        op.create_index(_INDEX, "turn", ["rollout_id"], postgresql_concurrently=True, postgresql_where=where)
        op.execute("SET lock_timeout = '5s'")


def downgrade() -> None:
    op.drop_index(_INDEX, table_name="turn")
    op.drop_column("turn", "routed_experts")
