"""how often the sweep has started a run's workflow again, and the namespace of an installation"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("restarts", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("run", sa.Column("restarted_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("installation", sa.Column("namespace_id", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("installation", "namespace_id")
    op.drop_column("run", "restarted_at")
    op.drop_column("run", "restarts")
