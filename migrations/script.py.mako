"""${message}"""

from services.postgres.migrate import refuse_downgrade, run_script

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    run_script("${up_revision}.sql")


def downgrade() -> None:
    refuse_downgrade(revision)
