"""Addresses: what is parsed, what is refused, where a server listens."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from memory_holdings import MemoryHoldings
from transfer_support import RUN_ID, SECRET, fail_to_resolve

from emergency_ckpt.cluster.coordination import own_address
from emergency_ckpt.core.address import (
    format_address,
    outside_hosts,
    parse_address,
    reachable_host,
    split_holder,
)
from emergency_ckpt.errors import ConfigError, TransferError
from emergency_ckpt.transfer import TransferClient, TransferServer
from emergency_ckpt.transfer.pool import NotConnected, each_address, numeric_addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        (
            "worker-3.job.default.svc.cluster.local:4000",
            "worker-3.job.default.svc.cluster.local",
            4000,
        ),
    ],
)
def test_addresses_round_trip(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":80",
        "::1:80",
        "[]:80",
        "[host]:80",
        "host:0",
        "host:65536",
        "host:-1",
        "host:8_0",
        "host:٣",
        "ho st:80",
        "[[::1]]:80",
        "http://host:80",
        "x" * 400 + ":80",
        "a..b:80",
        ".a:80",
        "x" * 64 + ".a:80",
    ],
)
def test_what_is_no_address_is_an_error(text: str) -> None:
    with pytest.raises(TransferError, match="not an address"):
        parse_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_all_interfaces_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="all interfaces"):
        TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET, bind_host=host)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b"])
def test_own_address_that_is_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        own_address(host)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b"])
def test_address_that_is_not_here_cannot_be_bound(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET, bind_host=host)


def test_port_in_use_is_a_clear_error() -> None:
    with TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET) as server:
        _, port = parse_address(server.address)
        with pytest.raises(ConfigError, match=str(port)):
            TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET, port=port)


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_names_and_ipv6_work(host: str) -> None:
    if host == "::1" and not _has_ipv6():
        host = "127.0.0.1"
    server = TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=SECRET, bind_host=host)
    with server, TransferClient(run_id=RUN_ID, secret=SECRET) as client:
        assert client.inventory(server.address).tensors == ()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_name_of_nobody_has_no_addresses(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_resolve(monkeypatch, number)
    assert numeric_addresses("train:7411") == []


@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_FAIL])
def test_name_that_cannot_be_asked_for_is_an_error(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_resolve(monkeypatch, number)
    with pytest.raises(NotConnected, match="train:7411"):
        numeric_addresses("train:7411")
    assert each_address("train:7411") == ["train:7411"]


def test_addresses_of_a_name_share_its_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service whose hosts have all gone without a word."""
    resolve = socket.getaddrinfo
    waits_s: list[float] = []

    def wait_in_vain(sock: socket.socket, place: object) -> None:
        waits_s.append(sock.gettimeout() or 0.0)
        time.sleep(waits_s[-1])
        raise TimeoutError

    def resolve_name(host: str, *args: Any, **options: Any) -> Any:
        addresses = [f"10.0.0.{n}" for n in range(1, 5)] if host == "pods" else [host]
        return [entry for each in addresses for entry in resolve(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_name)
    monkeypatch.setattr(socket.socket, "connect", wait_in_vain)
    with (
        TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=0.4) as client,
        pytest.raises(NotConnected, match="in time"),
    ):
        client.inventory("pods:1")
    assert 0 < sum(waits_s) <= 0.4
    assert waits_s[0] <= 0.1


def test_holder_is_split_from_its_address() -> None:
    holder = "0123456789abcdef" * 2
    assert split_holder(f"{holder}@10.0.0.3:80") == (holder, "10.0.0.3:80")
    assert split_holder(f"{holder}@[::1]:80") == (holder, "[::1]:80")
    assert split_holder("10.0.0.3:80") == ("", "10.0.0.3:80")
    for text in (
        "@10.0.0.3:80",
        "x@10.0.0.3:80",
        f"{holder.upper()}@h:1",
        f"{holder}@{holder}@h:1",
    ):
        with pytest.raises(TransferError, match="not an address"):
            parse_address(split_holder(text)[1])


@pytest.mark.parametrize(
    ("hosts", "outside"),
    [
        (["127.0.0.1"], ()),
        (["127.0.0.1", "127.0.1.1", "::1"], ()),
        (["10.0.0.1", "10.0.0.2"], ()),
        (["127.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"], ("10.0.0.1", "10.0.0.2")),
        (["::1", "fd00::2%eth0"], ("fd00::2%eth0",)),
        (["127.0.0.1", "no address"], ("no address",)),
        (["127.0.0.1", *(f"10.0.1.{n}" for n in range(100))], 8),
    ],
)
def test_outside_hosts_are_told_where_some_are_on_loopback(
    hosts: list[str], outside: tuple[str, ...] | int
) -> None:
    found = outside_hosts(hosts)
    assert (found if isinstance(outside, tuple) else len(found)) == outside


AWAY, HERE = ("10.0.0.2", "10.0.0.1"), ("10.0.0.1", "10.0.0.1")


@pytest.mark.parametrize(
    ("host", "routes", "is_given", "chosen"),
    [
        ("127.0.0.1", [], False, "127.0.0.1"),
        ("127.0.0.1", [AWAY], False, "10.0.0.1"),
        ("127.0.0.1", [HERE, ("10.1.0.2", "10.1.0.1")], False, "10.1.0.1"),
        ("127.0.0.1", [HERE], False, "10.0.0.1"),
        ("127.0.0.1", [("10.9.0.1", ""), AWAY], False, "10.0.0.1"),
        ("127.0.0.1", [HERE], True, "127.0.0.1"),
        ("10.0.0.7", [AWAY], False, "10.0.0.7"),
        ("10.0.0.7", [AWAY], True, "10.0.0.7"),
    ],
)
def test_address_that_others_cannot_reach_is_replaced(
    host: str, routes: list[tuple[str, str]], is_given: bool, chosen: str
) -> None:
    assert reachable_host(host, routes, is_given=is_given) == chosen


@pytest.mark.parametrize(
    ("routes", "is_given", "cause"),
    [
        ([AWAY], True, "bind_host is set to it"),
        ([HERE, AWAY], True, "bind_host is set to it"),
        ([("10.0.0.2", "")], False, "no other address of this host is known"),
        ([("10.0.0.2", "127.0.0.1")], False, "no other address of this host is known"),
    ],
)
def test_address_without_a_replacement_is_an_error(
    routes: list[tuple[str, str]], is_given: bool, cause: str
) -> None:
    with pytest.raises(ConfigError, match=f"cannot reach 127.0.0.1.*{cause}; set bind_host to"):
        reachable_host("127.0.0.1", routes, is_given=is_given)
