"""the set of each engine, and that of each run"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("engine", "run"):
        op.add_column(table, sa.Column("engine_set", sa.Text(), server_default="default", nullable=False))
    # A row belongs to one set for ever, so an address may have several.
    op.drop_constraint(op.f("uq_engine_address"), "engine")
    op.create_unique_constraint(op.f("uq_engine_address_engine_set"), "engine", ["address", "engine_set"])


def downgrade() -> None:
    op.drop_constraint(op.f("uq_engine_address_engine_set"), "engine")
    op.create_unique_constraint(op.f("uq_engine_address"), "engine", ["address"])
    for table in ("engine", "run"):
        op.drop_column(table, "engine_set")
