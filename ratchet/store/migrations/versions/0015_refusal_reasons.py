"""why a call of a session was refused"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("refusal", sa.Text(), nullable=True), if_not_exists=True)


def downgrade() -> None:
    op.drop_column("session", "refusal")
