"""why the newest try to boot a box failed, and an index by which the newest boxes are found"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandbox", sa.Column("boot_error", sa.Text(), nullable=True))
    op.create_index("ix_sandbox_created_at", "sandbox", ["created_at"], postgresql_using="brin")


def downgrade() -> None:
    op.drop_index("ix_sandbox_created_at", table_name="sandbox")
    op.drop_column("sandbox", "boot_error")
