"""The registry, jobs, results, usage and the outbox."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0001_initial"
down_revision = None


def upgrade() -> None:
    run_script("0001_initial.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
