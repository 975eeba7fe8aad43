import random
import socket

from services.localstack.ports import accepts_connections, free_ports, is_free


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_processes_with_the_same_random_seed_find_different_ports() -> None:
    """Pytest processes have the same seed, and a port that one has found but not used yet is free for the other too."""
    found = set()
    for _ in range(2):
        random.seed(7)
        found.add(tuple(free_ports(5)))
    assert len(found) == 2


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        assert accepts_connections(port)
    assert is_free(port)
    assert not accepts_connections(port)
