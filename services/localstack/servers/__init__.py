"""One class per server of the stack, used by `loraq up` and by the tests' fixtures."""

from services.localstack.servers.broker import Broker
from services.localstack.servers.postgres import Postgres
from services.localstack.servers.s3 import S3
from services.localstack.servers.server import Server, ServerError

__all__ = ["S3", "Broker", "Postgres", "Server", "ServerError"]
