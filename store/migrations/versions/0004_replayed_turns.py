"""when a turn was given to a later attempt"""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute("ALTER TABLE turn ADD COLUMN replayed_at timestamptz")
