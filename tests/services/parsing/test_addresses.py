"""Hosts, ports and URLs."""

import pytest

from services.parsing.addresses import host_and_port, hosts_of, is_database_url, is_host, is_http_url, is_port


def test_valid_hosts_are_accepted_and_others_are_not() -> None:
    for host in ("localhost", "my_service", "a.b-c.example", "127.0.0.1", "::1", "[::1]", "bücher.example"):
        assert is_host(host), host
    for host in ("", "a b", "a..b", "a" * 64, ".".join(["a" * 60] * 5), "a/b", "a:1", "\udcff", "[a]"):
        assert not is_host(host), host


def test_a_port_is_a_number_from_1_to_65535() -> None:
    assert is_port("1")
    assert is_port("65535")
    assert not any(map(is_port, ("", "0", "65536", "99999", "-1", "abc", "1_0", "9" * 5000)))


def test_host_and_port_are_split() -> None:
    assert host_and_port("host:9092") == ("host", "9092")
    assert host_and_port("host") == ("host", "")
    assert host_and_port("[::1]:9092") == ("[::1]", "9092")
    assert host_and_port("::1") == ("", ":1")


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://loraq:secret@127.0.0.1:5433/loraq", "127.0.0.1:5433"),
        ("postgres://host/loraq", "host:5432"),
        ("postgresql://loraq:secret@one:1,two:2/loraq", "one:1,two:2"),
        ("postgresql://loraq@[::1]/loraq", "[::1]:5432"),
        ("postgresql:///loraq?host=/run/postgresql&port=5433", "the local socket:5432"),
        ("postgresql://%2Frun%2Fpostgresql/loraq", "%2Frun%2Fpostgresql:5432"),
    ],
)
def test_a_postgres_url_is_accepted_and_its_hosts_are_extracted(url: str, hosts: str) -> None:
    assert is_database_url(url)
    assert hosts_of(url) == hosts


@pytest.mark.parametrize(
    "url",
    [
        "postgres://h:abc/x",
        "postgres://h:99999/x",
        "postgres://one:1,two:x/x",
        "postgres://[::1/x",
        "postgres:///x?port=abc",
        "postgres://" + "h" * 300 + "/x",
        "mysql://h/x",
        "h:5432/x",
        "",
    ],
)
def test_an_invalid_postgres_url_is_refused(url: str) -> None:
    assert not is_database_url(url)


def test_an_http_url_has_a_valid_host_and_port() -> None:
    for url in ("http://127.0.0.1:4318", "https://s3.example", "http://[::1]:9000/", "http://user:pw@host/path?x=1"):
        assert is_http_url(url), url
    for url in (
        "",
        "host:4318",
        "http://",
        "http://:80",
        "http://h:0",
        "http://h:99999",
        "ftp://h",
        "http://[::1",
        "http://a b",
    ):
        assert not is_http_url(url), url
