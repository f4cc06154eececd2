"""what the learner saw of every trained token"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trained_turn",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_id", sa.BigInteger(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("entropies", sa.LargeBinary(), nullable=False),
        sa.Column("log_ratios", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name=op.f("fk_trained_turn_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "step", "turn_id", name=op.f("pk_trained_turn")),
    )
    op.create_index(op.f("ix_trained_turn_rollout_id"), "trained_turn", ["rollout_id"])


def downgrade() -> None:
    op.drop_table("trained_turn")
