"""the rewards with which a step consumed a group"""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE batch_item ADD COLUMN rewards jsonb DEFAULT '[]' NOT NULL")
    op.execute(
        "UPDATE batch_item SET rewards = seen.rewards "
        "FROM (SELECT group_id, jsonb_agg(reward ORDER BY member) AS rewards FROM rollout WHERE reward IS NOT NULL "
        "AND NOT late AND replaced_by IS NULL GROUP BY group_id) AS seen WHERE seen.group_id = batch_item.group_id"
    )
