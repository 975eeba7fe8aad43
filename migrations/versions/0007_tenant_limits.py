"""Limits per tenant, the status of workers, and the reason for which a job waits."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0007_tenant_limits"
down_revision = "0006_resent_webhooks"


def upgrade() -> None:
    run_script("0007_tenant_limits.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
