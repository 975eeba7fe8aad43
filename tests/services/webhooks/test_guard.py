"""Private addresses are refused in every spelling."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from services.errors import ConfigError
from services.webhooks.guard import BAD_PORTS, DENIED, NAT64, AddressGuard, parse_url
from services.webhooks.outcome import AttemptResult, NotAllowed, Unsendable

ALLOWED = ["8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.0.1", "100.128.0.1", "2606:4700::1", "2a00::1"]
REFUSED = [
    "0.0.0.0",  # noqa: S104  # an address to refuse
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:7f00:1",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:808:808::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "2606:4700::1%1",
    "",
    "localhost",
    "127.1",
    "0x7f.0.0.1",
    "2130706433",
]


def refusal(target: str, allow: tuple[str, ...] = ()) -> AttemptResult | None:
    url = parse_url(target)
    return url if isinstance(url, Unsendable) else AddressGuard(allow).refuse(url)


@pytest.mark.parametrize("address", ALLOWED)
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressGuard().allows(address)


@pytest.mark.parametrize("address", REFUSED)
def test_other_addresses_are_refused(address: str) -> None:
    assert not AddressGuard().allows(address)


def test_an_ipv4_address_embedded_in_ipv6_is_checked_as_ipv4() -> None:
    assert AddressGuard().allows("::ffff:8.8.8.8")
    assert AddressGuard().allows("64:ff9b::8.8.8.8")
    assert AddressGuard(["10.0.0.0/8"]).allows("::ffff:10.1.2.3")
    assert not AddressGuard(["::/0"]).allows("::ffff:10.1.2.3")


def test_an_allowed_network_is_reachable_and_no_other() -> None:
    guard = AddressGuard(["127.0.0.0/8", "fd00:1::/32", "10.1.2.3"])
    assert all(guard.allows(address) for address in ("127.9.9.9", "fd00:1::5", "10.1.2.3", "8.8.8.8"))
    assert not any(guard.allows(address) for address in ("10.1.2.4", "fd00:2::5", "::1", "127.0.0.1%1"))


@pytest.mark.parametrize("cidr", ["loopback", "10.0.0.0/33", "10.0.0.0/8;", ""])
def test_a_malformed_network_is_reported(cidr: str) -> None:
    with pytest.raises(ConfigError, match=f"LORAQ_WEBHOOK_ALLOW_NETWORKS.*{cidr}"):
        AddressGuard([cidr])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "[fe80::1%25lo]",
        "[fe80::1%251]",
        "[2606:4700::1%25lo]",
        "169.254.169.254",
        "①②⑦.⓪.⓪.①",
        "１２７.0.0.1",  # noqa: RUF001
        "127。0。0。1",
    ],
)
def test_a_literal_is_refused_in_every_spelling(host: str) -> None:
    assert refusal(f"http://{host}/hook") in (NotAllowed(), Unsendable("the URL is malformed"))


@pytest.mark.parametrize("spelling", ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1"])
def test_odd_spellings_stay_refused_even_for_an_allowed_network(spelling: str) -> None:
    assert refusal(f"http://{spelling}/", allow=("127.0.0.0/8",)) == NotAllowed()


@pytest.mark.parametrize(
    "target",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com/",
        "example.com/hook",
        "",
        "http://",
        "http:///path",
        "http://user:password@example.com/",
        "http://example.com@127.0.0.1/",
        "http://example.com:99999/",
        "http://example.com:port/",
        "http://[::1/",
        "http://exa mple.com/",
        "http://exam$ple.com/",
        "http://./",
    ],
)
def test_a_url_that_is_not_plain_http_is_refused(target: str) -> None:
    assert isinstance(refusal(target), Unsendable)


@pytest.mark.parametrize("target", ["https://example.com/", "http://example.com:8080/a?b=c", "https://bücher.example/"])
def test_a_host_name_is_left_to_the_resolver(target: str) -> None:
    assert refusal(target) is None


def test_ports_of_other_protocols_are_refused() -> None:
    assert refusal("http://example.com:25/") == Unsendable("webhooks may not use port 25")
    assert {80, 443, 8080, 8443}.isdisjoint(BAD_PORTS)


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_addresses_that_python_calls_special_are_refused_too(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    special = address.is_private or address.is_loopback or address.is_multicast or address.is_link_local
    embeds_ipv4 = isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped is not None or address in NAT64)
    if (special or address.is_reserved or address.is_unspecified) and not embeds_ipv4:
        assert not AddressGuard().allows(str(address))


@given(data=st.data(), network=st.sampled_from(DENIED))
def test_every_address_of_the_table_is_refused_literally_and_embedded(
    data: st.DataObject, network: ipaddress.IPv4Network
) -> None:
    number = data.draw(st.integers(int(network.network_address), int(network.broadcast_address)))
    address = ipaddress.ip_address(number) if network.version == 4 else ipaddress.IPv6Address(number)
    if isinstance(address, ipaddress.IPv4Address):
        embeddings = [str(address), f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"]
        assert not any(AddressGuard().allows(embedding) for embedding in embeddings)
    elif address.ipv4_mapped is None and not str(address).startswith("64:ff9b::"):
        assert not AddressGuard().allows(str(address))


@given(st.text(max_size=30))
@example("\0")
def test_no_text_breaks_the_guard(text: str) -> None:
    refusal(f"http://{text}/")
    refusal(text)
    AddressGuard().allows(text)


def test_the_url_keeps_its_host() -> None:
    url = parse_url("https://Example.com:8443/hook?a=%20b")
    assert isinstance(url, URL)
    assert str(url) == "https://example.com:8443/hook?a=%20b"
