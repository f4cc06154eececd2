"""the files from which images of tasks are built"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "build_context",
        sa.Column("image", sa.Text(), nullable=False),
        sa.Column("archive", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("image", name=op.f("pk_build_context")),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("build_context")
