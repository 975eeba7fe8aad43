"""Alembic's environment; runs only with the connection that `services.postgres.migrate` passes in."""

from alembic import context

from services.postgres.migrate import VERSION_SCHEMA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    version_table_schema=VERSION_SCHEMA,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
