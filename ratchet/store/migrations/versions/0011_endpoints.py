"""sessions whose calls an OpenAI-compatible endpoint answers, and why it does not"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("endpoint", postgresql.JSONB(), nullable=True))
    op.add_column("session", sa.Column("endpoint_error", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("session", "endpoint_error")
    op.drop_column("session", "endpoint")
