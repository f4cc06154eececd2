"""the turn that a group is forked from"""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("ALTER TABLE rollout_group ADD COLUMN forked_turn_id bigint")
    op.execute(
        "CREATE INDEX ix_rollout_group_forked_turn_id ON rollout_group (forked_turn_id) "
        "WHERE forked_turn_id IS NOT NULL"
    )
