"""a task's own rewards, calls that are text, turns given to a later attempt, the turn that a group is forked from"""

from alembic import op

revision = "0005"
down_revision = "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE grade ADD COLUMN rewards jsonb")
    op.execute("ALTER TABLE turn ADD COLUMN unread_call text, ADD COLUMN replayed_at timestamptz")
    op.execute("ALTER TABLE rollout_group ADD COLUMN forked_turn_id bigint")
    op.execute(
        "CREATE INDEX ix_rollout_group_forked_turn_id ON rollout_group (forked_turn_id) "
        "WHERE forked_turn_id IS NOT NULL"
    )
