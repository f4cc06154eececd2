"""whether a session's first call was refused, and when its calls waited for an engine"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TSTZMULTIRANGE

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("refused_at", sa.DateTime(timezone=True)))
    op.add_column("session", sa.Column("engine_waits", TSTZMULTIRANGE(), server_default="{}", nullable=False))


def downgrade() -> None:
    op.drop_column("session", "engine_waits")
    op.drop_column("session", "refused_at")
