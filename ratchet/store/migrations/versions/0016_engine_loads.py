"""when each engine has loaded which version"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engine_load",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("engine_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("loaded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["engine_id"], ["engine.id"], name=op.f("fk_engine_load_engine_id_engine")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engine_load")),
        if_not_exists=True,
    )
    for column in ("engine_id", "version"):
        op.create_index(op.f(f"ix_engine_load_{column}"), "engine_load", [column], if_not_exists=True)


def downgrade() -> None:
    op.drop_table("engine_load")
