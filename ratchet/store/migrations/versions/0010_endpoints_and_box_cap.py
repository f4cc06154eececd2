"""sessions whose calls an OpenAI-compatible endpoint answers, and the adaptive limit of boxes"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("endpoint", postgresql.JSONB(), nullable=True))
    op.add_column("session", sa.Column("endpoint_error", sa.Text(), nullable=True))
    op.add_column("run", sa.Column("box_cap", sa.Integer(), nullable=True))
    op.add_column("run", sa.Column("box_cap_cause", sa.Text(), nullable=True))
    op.add_column("run", sa.Column("box_cap_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    for column in ("box_cap_at", "box_cap_cause", "box_cap"):
        op.drop_column("run", column)
    op.drop_column("session", "endpoint_error")
    op.drop_column("session", "endpoint")
