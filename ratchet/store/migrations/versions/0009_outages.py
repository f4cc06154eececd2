"""outages of parts of the stack, which time limits of rollouts do not count"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outage",
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("part", "began_at", name=op.f("pk_outage")),
    )
    op.create_index("ix_outage_ended_at", "outage", ["ended_at"])


def downgrade() -> None:
    op.drop_table("outage")
