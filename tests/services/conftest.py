"""Settings for tests that need the store alone."""

from pathlib import Path

import pytest

from services.localstack.servers import S3
from services.settings import Settings


@pytest.fixture
def store_settings(s3_server: S3, bucket: str, tmp_path: Path) -> Settings:
    """Settings with a fresh bucket and cache directory; neither database nor broker is started for them."""
    return Settings(
        _env_file=None,
        s3_endpoint=s3_server.endpoint,
        s3_access_key=s3_server.access_key,
        s3_secret_key=s3_server.secret_key,
        s3_bucket=bucket,
        cache_dir=tmp_path / "cache",
    )
