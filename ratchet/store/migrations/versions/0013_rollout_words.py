"""the words of conversations, for the full-text search"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import TSVECTOR

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_WITHOUT_WORDS = "ix_rollout_without_words"


def upgrade() -> None:
    # The index on the new column is built in transactions of its own, so an interrupted migration finds the rest made.
    has_words: sa.Column[bool] = sa.Column("has_words", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("rollout", has_words, if_not_exists=True)
    op.create_table(
        "rollout_words",
        sa.Column("rollout_id", sa.BigInteger(), nullable=False),
        sa.Column("words", TSVECTOR(), nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollout.id"], name=op.f("fk_rollout_words_rollout_id_rollout")),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollout_words")),
        if_not_exists=True,
    )
    op.create_index("ix_rollout_words_words", "rollout_words", ["words"], postgresql_using="gin", if_not_exists=True)
    # As in 0005: built beside the statements of a running stack, after the rest of an interrupted build is dropped.
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index(_WITHOUT_WORDS, table_name="rollout", postgresql_concurrently=True, if_exists=True)
        op.create_index(
            _WITHOUT_WORDS, "rollout", ["run_id", "id"], postgresql_concurrently=True,
            postgresql_where=sa.text("NOT has_words"),
        )  # fmt: skip
        op.execute("SET lock_timeout = '5s'")


def downgrade() -> None:
    op.drop_index(_WITHOUT_WORDS, table_name="rollout")
    op.drop_table("rollout_words")
    op.drop_column("rollout", "has_words")
