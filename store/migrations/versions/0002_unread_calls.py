"""the cause of a call that is text for its client"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turn", sa.Column("unread_call", sa.Text()))
