"""Validates hosts, ports and URLs. Pure."""

import re
from ipaddress import ip_address
from urllib.parse import parse_qs, unquote, urlsplit

LAST_PORT = 65535


def is_host(text: str) -> bool:
    """Whether the text is a valid host name or IP address; an IPv6 address may be in brackets."""
    try:
        ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        pass
    else:
        return True
    try:
        name = text.encode("idna")
    except UnicodeError:  # an empty or too long label
        return False
    return re.fullmatch(rb"[A-Za-z0-9._-]{1,253}", name) is not None


def is_port(text: str) -> bool:
    """Whether the text is a port number from 1 to 65535."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= LAST_PORT


def host_and_port(address: str) -> tuple[str, str]:
    """The two parts of `host:port` or `[IPv6]:port`; the port is empty if missing."""
    if address.startswith("["):
        host, bracket, port = address.partition("]")
        return host + bracket, port.removeprefix(":")
    host, _, port = address.partition(":")
    return host, port


def is_http_url(url: str) -> bool:
    """Whether the text is an http or https URL with a valid host and port."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    host, port = host_and_port(parts.netloc.rpartition("@")[2])
    return parts.scheme in ("http", "https") and is_host(host) and (not port or is_port(port))


def is_database_url(url: str) -> bool:
    """Whether the text is a valid Postgres URL; several hosts, sockets and `?port=` are allowed."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    hosts = parts.netloc.rpartition("@")[2]
    addresses = [host_and_port(address) for address in hosts.split(",")] if hosts else []
    ports = [port for _, port in addresses if port]
    ports += [port for listed in parse_qs(parts.query).get("port", []) for port in listed.split(",")]
    return (
        parts.scheme in ("postgres", "postgresql")
        and all(not host or is_host(host) or unquote(host).startswith("/") for host, _ in addresses)
        and all(map(is_port, ports))
    )


def hosts_of(database_url: str, default_port: int = 5432) -> str:
    """host:port of the database, or several, for messages; without the password."""
    hosts = urlsplit(database_url).netloc.rpartition("@")[2] or "the local socket"
    return hosts if re.search(r":[0-9]+$", hosts) else f"{hosts}:{default_port}"
