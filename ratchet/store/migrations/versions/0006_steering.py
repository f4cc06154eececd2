"""what people ask of runs, the step after which a run is stopped, its best step, and the dataset of each task"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("stop_at", sa.Integer(), nullable=True))
    op.add_column("run", sa.Column("best_step", sa.Integer(), nullable=True))
    op.add_column("run", sa.Column("best_rate", sa.Float(53), nullable=True))
    op.add_column("run_task", sa.Column("dataset_no", sa.Integer(), nullable=True))
    op.create_table(
        "steering",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), server_default="", nullable=False),
        sa.Column("before", postgresql.JSONB(), nullable=False),
        sa.Column("after", postgresql.JSONB(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("from_step", sa.Integer(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_steering_run_id_run"),
        sa.PrimaryKeyConstraint("id", name="pk_steering"),
        sa.UniqueConstraint("run_id", "request_id", "target", name="uq_steering_run_id"),
    )


def downgrade() -> None:
    op.drop_table("steering")
    op.drop_column("run_task", "dataset_no")
    for column in ("best_rate", "best_step", "stop_at"):
        op.drop_column("run", column)
