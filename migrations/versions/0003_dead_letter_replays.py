"""Marks of replayed dead letters."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0003_dead_letter_replays"
down_revision = "0002_parking_and_cancellation"


def upgrade() -> None:
    run_script("0003_dead_letter_replays.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
