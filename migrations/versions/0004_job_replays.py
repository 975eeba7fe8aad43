"""Links from replayed jobs to the new ones."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0004_job_replays"
down_revision = "0003_dead_letter_replays"


def upgrade() -> None:
    run_script("0004_job_replays.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
