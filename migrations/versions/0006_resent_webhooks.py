"""Webhooks that an operator sends again."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0006_resent_webhooks"
down_revision = "0005_hot_path"


def upgrade() -> None:
    run_script("0006_resent_webhooks.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
