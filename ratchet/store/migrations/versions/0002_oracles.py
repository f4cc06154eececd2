"""oracles, broken oracles, control runs and flags of grades"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_JSON = postgresql.JSONB(astext_type=sa.Text())


def _key_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("grader", sa.Text(), nullable=False),
        sa.Column("grader_version", sa.Text(), nullable=False),
    ]


def upgrade() -> None:
    op.add_column("admission", sa.Column("oracle", _JSON, nullable=True))
    op.add_column("grade", sa.Column("has_oracle", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("grade", sa.Column("control", _JSON, nullable=True))
    op.add_column("grade", sa.Column("flags", _JSON, server_default=sa.text("'[]'"), nullable=False))
    op.create_table(
        "trial",
        *_key_columns(),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("oracle", _JSON, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("fk_trial_task_id_task")),
        sa.PrimaryKeyConstraint("task_id", "grader", "grader_version", "repeat", name=op.f("pk_trial")),
    )
    op.create_table(
        "broken_oracle",
        *_key_columns(),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("content", _JSON, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("fk_broken_oracle_task_id_task")),
        sa.PrimaryKeyConstraint("task_id", "grader", "grader_version", "number", name=op.f("pk_broken_oracle")),
    )


def downgrade() -> None:
    op.drop_table("broken_oracle")
    op.drop_table("trial")
    op.drop_column("grade", "flags")
    op.drop_column("grade", "control")
    op.drop_column("grade", "has_oracle")
    op.drop_column("admission", "oracle")
