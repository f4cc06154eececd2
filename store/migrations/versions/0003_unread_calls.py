"""the cause of a call that is text for its client"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("ALTER TABLE turn ADD COLUMN unread_call text")
