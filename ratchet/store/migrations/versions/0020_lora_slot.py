"""the LoRA slot of each run, in the engines of its set"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("lora_slot", sa.Integer(), server_default="1", nullable=False))


def downgrade() -> None:
    op.drop_column("run", "lora_slot")
