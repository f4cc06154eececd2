"""the numbers of a task's own reward file, beside the verdict"""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE grade ADD COLUMN rewards jsonb")
