"""Parked jobs and stored cancellations."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0002_parking_and_cancellation"
down_revision = "0001_initial"


def upgrade() -> None:
    run_script("0002_parking_and_cancellation.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
