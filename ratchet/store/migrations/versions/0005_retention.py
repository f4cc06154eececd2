"""which runs are pruned, and indexes for foreign keys"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_rollout_task_id": ("rollout", "task_id"),
    "ix_rollout_group_task_id": ("rollout_group", "task_id"),
    "ix_grade_patch_id": ("grade", "patch_id"),
    "ix_batch_item_group_id": ("batch_item", "group_id"),
}


def upgrade() -> None:
    # The tables may be large and in use, so each index is built beside the statements of a running stack. It waits for
    # older transactions, which it does not hold up. If a build is interrupted, its invalid index is dropped first.
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        for name, (table, column) in _INDEXES.items():
            op.drop_index(name, table_name=table, postgresql_concurrently=True, if_exists=True)
            op.create_index(name, table, [column], postgresql_concurrently=True)
        op.execute("SET lock_timeout = '5s'")
    # After the indexes, in the transaction that records the revision: an interrupted migration can be repeated.
    op.add_column("run", sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("run", sa.Column("archived_to", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("run", sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    for name, (table, _) in _INDEXES.items():
        op.drop_index(name, table_name=table)
    for column in ("archived_at", "archived_to", "pruned_at"):
        op.drop_column("run", column)
