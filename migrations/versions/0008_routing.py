"""Where adapters are, and hot adapters."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0008_routing"
down_revision = "0007_tenant_limits"


def upgrade() -> None:
    run_script("0008_routing.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
