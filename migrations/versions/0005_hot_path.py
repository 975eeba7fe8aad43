"""Fewer index entries for each job."""

from services.postgres.migrate import refuse_downgrade, run_script

revision = "0005_hot_path"
down_revision = "0004_job_replays"


def upgrade() -> None:
    run_script("0005_hot_path.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
