"""the place of an installation's database, and the ids of the installations that it was copied or moved from"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("installation", sa.Column("place", sa.Text(), nullable=True))
    for name in ("moved_from", "copied_from"):
        op.add_column("installation", sa.Column(name, JSONB(), server_default=sa.text("'[]'"), nullable=False))


def downgrade() -> None:
    for name in ("copied_from", "moved_from", "place"):
        op.drop_column("installation", name)
