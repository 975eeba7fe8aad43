"""Which addresses a webhook may reach: public ones, and networks that the operator allows.

The table is explicit because `ipaddress.is_global` is true for some addresses that lead into private networks. An IPv4
address embedded in an IPv6 address is checked as the IPv4 address.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from yarl import URL

from services.errors import ConfigError
from services.parsing.addresses import is_host
from services.webhooks.outcome import HOW_TO_ALLOW, NotAllowed, Unsendable

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DENIED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(cidr)
    for cidr in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; also a cloud's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's metadata service on a public address
        "169.254.0.0/16",  # link-local; metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata service
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT relays
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
        "::/3",  # unspecified, loopback, IPv4-compatible, NAT64, discard-only
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarking
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
        "4000::/2",  # not assigned
        "8000::/1",  # not assigned, unique local, link-local, site-local, multicast
    )
)
HOST_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

# Ports of services that interpret a line of text as a command; a webhook to one could attack that service.
BAD_PORTS = frozenset(
    {0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109}
    | {110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530}
    | {531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190}
    | {5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080}
)


class AddressNotAllowedError(Exception):
    """A connection to a refused address was attempted."""

    def __init__(self, address: str) -> None:
        super().__init__(f"webhooks may not connect to {address}; {HOW_TO_ALLOW}")
        self.address = address


class AddressGuard:
    """`allow` lists networks (CIDR) that are exempt from the table; raises ConfigError for a malformed one."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allowed = tuple(_network(cidr) for cidr in allow)

    def allows(self, address: str) -> bool:
        """Whether webhooks may connect to this literal address; False for anything that is not a plain address."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return "%" not in address and self._allows(found)

    def _allows(self, address: Address) -> bool:
        embedded = _embedded_ipv4(address)
        if embedded is not None:
            return self._allows(embedded)
        if _within(address, self._allowed):
            return True
        return not _within(address, DENIED)

    def check(self, address: str) -> None:
        """Raise AddressNotAllowedError unless `address` is allowed."""
        if not self.allows(address):
            raise AddressNotAllowedError(address)

    def refuse(self, url: URL) -> Unsendable | NotAllowed | None:
        """Why this URL is refused; None if it is allowed, subject to the addresses that its host name resolves to."""
        if url.scheme not in ("http", "https") or not url.raw_host:
            return Unsendable("the URL must begin with http:// or https:// and name a host")
        if url.raw_user is not None or url.raw_password is not None:
            return Unsendable("the URL must not hold a user name or password")
        if url.port in BAD_PORTS:
            return Unsendable(f"webhooks may not use port {url.port}")
        return self._refuse_host(url.raw_host.rstrip("."))

    def _refuse_host(self, host: str) -> Unsendable | NotAllowed | None:
        """Check literal addresses, refuse other spellings of a number; names are resolved later."""
        if ":" in host or "%" in host or _reads_as_number(host):
            return None if self.allows(host) else NotAllowed(host)
        return None if HOST_NAME.fullmatch(host) and is_host(host) else Unsendable("the URL's host is not a host name")


def parse_url(target: str) -> URL | Unsendable:
    """The parsed URL, or why it cannot be used."""
    try:
        url = URL(target)
        _ = url.port
    except ValueError:
        return Unsendable("the URL is malformed")
    return url


def _network(cidr: str) -> Network:
    try:
        return ipaddress.ip_network(cidr, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"LORAQ_WEBHOOK_ALLOW_NETWORKS: {cidr!r} is not a network; write it like 10.1.0.0/16"
        ) from error


def _within(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address in network for network in networks if network.version == address.version)


def _embedded_ipv4(address: Address) -> IPv4Address | None:
    """The IPv4 address inside an IPv4-mapped or NAT64 address."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None


def _reads_as_number(host: str) -> bool:
    """Whether the C library parses this as an IPv4 address: decimal, octal, hexadecimal, one to four parts."""
    try:
        socket.inet_aton(host)
    except (OSError, ValueError):  # ValueError: U+0000
        return False
    return True
