"""Tests of staging need only the store."""

import pytest

from services.process.settings import Settings


@pytest.fixture
def settings(store_settings: Settings) -> Settings:
    return store_settings
