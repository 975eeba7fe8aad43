"""The row models match the public columns of the migrated database, including their comments."""

from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from schemas.common import AdapterStatus
from schemas.rows import AdapterRow, JobRow, ResultRow, TenantLimitRow, UsageRow, WebhookDeliveryRow

TABLES: dict[str, type[BaseModel]] = {
    "jobs": JobRow,
    "results": ResultRow,
    "adapters": AdapterRow,
    "webhook_deliveries": WebhookDeliveryRow,
    "usage_hourly": UsageRow,
    "tenant_limits": TenantLimitRow,
}
JSON_TYPES = {
    "text": {"string"},
    "uuid": {"string"},
    "date": {"string"},
    "timestamp with time zone": {"string"},
    "integer": {"integer"},
    "bigint": {"integer"},
    "double precision": {"number"},
    "boolean": {"boolean"},
    "text[]": {"array"},
    "integer[]": {"array"},
    "jsonb": {"object", "array"},
}
COLUMNS = """
select attname as name, format_type(atttypid, atttypmod) as type, not attnotnull as nullable,
       col_description(attrelid, attnum) as comment
from pg_attribute where attrelid = ('loraq.' || $1)::regclass and attnum > 0 and not attisdropped
order by attnum
"""


async def _columns(database_url: str, table: str) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(database_url)
    try:
        return [dict(record) for record in await connection.fetch(COLUMNS, table)]
    finally:
        await connection.close()


def _types(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """JSON types that a property allows, following references and unions."""
    if "$ref" in schema:
        return _types(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in schema:
        return {kind for option in schema["anyOf"] for kind in _types(option, definitions)}
    return {schema["type"]}


@pytest.mark.parametrize("table", TABLES)
async def test_models_match_the_database(database_url: str, table: str) -> None:
    columns = await _columns(database_url, table)
    public = {c["name"]: c for c in columns if not (c["comment"] or "").startswith("Private.")}
    schema = TABLES[table].model_json_schema()
    assert list(schema["properties"]) == list(public)
    for name, field in schema["properties"].items():
        kinds = _types(field, schema.get("$defs", {}))
        assert ("null" in kinds) == public[name]["nullable"], name
        assert kinds - {"null"} <= JSON_TYPES[public[name]["type"]], name
        assert field["description"] == public[name]["comment"], name


ADAPTER = """
insert into loraq.adapters (tenant, name, version, status, target_modules, uri, digest, size_bytes)
values ('acme', 'tone', 1, 'ready', '{q_proj,v_proj}', 's3://loraq/acme/tone/d/', 'd', 10) returning *
"""


async def test_a_record_of_the_database_validates_as_a_row(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("insert into loraq.tenants values ('acme', '', '')")
        record = await connection.fetchrow(ADAPTER)
    finally:
        await connection.close()
    assert record is not None
    row = AdapterRow.model_validate(dict(record))
    assert row.status is AdapterStatus.READY
    assert row.target_modules == ("q_proj", "v_proj")
