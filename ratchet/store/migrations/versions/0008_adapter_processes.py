"""leases of adapter processes, so that a lease's renewal writes no turn"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_process",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("alive_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_process")),
    )
    op.add_column("turn", sa.Column("worker", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("turn", "worker")
    op.drop_table("adapter_process")
