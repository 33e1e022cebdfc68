"""``eckpt serve --drain-to``: servers notice that their job is over, and one of them drains."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch_support import free_port
from looks import USAGE_EXIT_CODE, eckpt_here
from places import JOBS
from programs import Program, serving
from quarters import save_quarters
from tiers_support import RUN_ID, open_tier
from transfer_support import fail_to_resolve

from emergency_ckpt.background import SignalFlag, run_in_thread
from emergency_ckpt.run_secret import generate_secret
from emergency_ckpt.tools.cli.main import parse
from emergency_ckpt.tools.draining.last import LastDrain
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import TransferClient, TransferServer

LONG_S = 240.0
AFTER_S = 10.0
HELD_S = 60.0
"""For so long a name is looked up, unless the test lets go of it."""
HOSTS = 3
Servers = list[Program]
Start = Callable[..., Servers]


@pytest.fixture
def secret(tmp_path: Path) -> bytes:
    secret = generate_secret()
    (tmp_path / "secret").write_bytes(secret)
    (tmp_path / "secret").chmod(0o600)
    return secret


@pytest.fixture
def start(ramdisk: Path, tmp_path: Path, secret: bytes) -> Iterator[Start]:
    """Starts a server on each of three hosts, of which none has a whole step."""
    del secret  # its file is read by the servers
    for host, held in enumerate(({0: [0, 1]}, {1: [2]}, {2: [3, 0]})):
        save_quarters(ramdisk / str(host), held)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    addresses = [f"127.0.0.{2 + host}:{port}" for host in range(HOSTS)]
    options = ["--secret-file", tmp_path / "secret", "--port", port]
    options += ["--drain-to", tmp_path / "dir", "--peers", ",".join(addresses)]
    with ExitStack() as running:

        def serve(*when: str, trainers: str = "127.0.0.1:9") -> Servers:
            words = (*options, "--trainers", trainers, *when)
            places = [(ramdisk / str(host), f"127.0.0.{2 + host}") for host in range(HOSTS)]
            servers = [
                serving(ram, RUN_ID, "--bind", ip, *words, stderr=subprocess.STDOUT)
                for ram, ip in places
            ]
            return [running.enter_context(each)[0] for each in servers]

        yield serve


def ends(servers: Servers) -> list[str]:
    """Wait until all have ended well; return their outputs."""
    outputs = [server.communicate(timeout=LONG_S)[0] for server in servers]
    assert [server.returncode for server in servers] == [0] * len(servers), outputs
    return outputs


def marker(tmp_path: Path, step: int = 5) -> Path:
    return tmp_path / "dir" / "host_state" / f"{step}" / "marker.json"


def test_servers_that_stop_leave_the_step_in_storage(start: Start, tmp_path: Path) -> None:
    servers = start("--drain-at-stop", "0.1")
    for server in servers:
        server.send_signal(signal.SIGTERM)
    first, second, third = ends(servers)
    assert "drained step 5" in first
    assert "nothing to drain" in second
    assert third == ""
    assert marker(tmp_path).exists()


def test_servers_that_stop_beside_a_job_drain_nothing(
    start: Start, tmp_path: Path, ramdisk: Path, secret: bytes
) -> None:
    (ramdisk / "trainer").mkdir(mode=0o700)
    holdings = ReadOnlyRamdisk(ramdisk / "trainer", RUN_ID)
    with TransferServer(holdings, run_id=RUN_ID, secret=secret) as trainer:
        # As long as the trainer may take to answer.
        servers = start("--drain-at-stop", "5", trainers=trainer.address)
        servers[0].send_signal(signal.SIGTERM)
        (output,) = ends(servers[:1])
    holdings.close()
    assert output == "eckpt serve: the job runs on other hosts: nothing is drained\n"
    assert not (tmp_path / "dir").exists()


def test_servers_without_a_job_for_long_drain_once(
    start: Start, tmp_path: Path, ramdisk: Path
) -> None:
    process = open_tier(ramdisk / "0", process_index=0)  # holds its lock
    servers = start("--drain-after", "3")
    process.close()
    assert servers[0].line() == f"eckpt serve: the job is over: drain to {tmp_path / 'dir'}"
    # A drain that takes ten seconds and more reports its progress before.
    assert any("drained step 5" in line for line in iter(servers[0].line, ""))
    assert marker(tmp_path).exists()
    for server in servers:
        server.send_signal(signal.SIGTERM)
    assert ends(servers) == ["", "", ""]


@pytest.mark.parametrize("when", ["--drain-at-stop", "--drain-after"])
def test_second_signal_ends_a_drain(
    tmp_path: Path, ramdisk: Path, secret: bytes, when: str
) -> None:
    del secret  # its file is read by the server
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    with socket.create_server(("127.0.0.9", 0)) as silent:  # the drain waits for its answer
        words = ["--secret-file", tmp_path / "secret", "--drain-to", tmp_path / "dir", when, 0.1]
        words += ["--trainers", "127.0.0.1:9", "--peers", f"127.0.0.9:{silent.getsockname()[1]}"]
        with serving(ramdisk, RUN_ID, *words, stderr=subprocess.STDOUT) as (server, _):
            if when == "--drain-at-stop":
                server.send_signal(signal.SIGTERM)
            assert server.line().startswith("eckpt serve: the job is over: drain to")
            if when == "--drain-after":
                server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGINT)  # another than the first: two of one kind may be one
            assert ends([server]) == ["eckpt serve: a second signal has ended the drain\n"]
    assert not marker(tmp_path).exists()


@pytest.fixture
def client(secret: bytes) -> Iterator[TransferClient]:
    with TransferClient(run_id=RUN_ID, secret=secret) as client:
        yield client


def serve_options(
    root: Path, ramdisk: Path, trainers: str, peers: Sequence[str] = ()
) -> argparse.Namespace:
    words = ["serve", "--local-dir", ramdisk, "--run-id", RUN_ID, "--secret-file", root / "secret"]
    words += ["--drain-to", root / "dir", "--drain-after", AFTER_S, "--trainers", trainers]
    words += ["--peers", ",".join(peers)] if peers else []
    args = parse([*map(str, words)])
    assert args is not None
    return args


def drained_once(root: Path, ramdisk: Path, client: TransferClient, port: int) -> LastDrain:
    """A server beside no trainer, which has drained step 5; other trainers are at ``port``."""
    save_quarters(ramdisk / "0", {0: [0, 1, 2, 3]}, step=5)
    args = serve_options(root, ramdisk / "0", f"127.0.0.1:{port}")
    last = LastDrain(args, "127.0.0.1:1", client, print, SignalFlag(), SignalFlag())
    last.poll(0, AFTER_S)
    last.poll(AFTER_S, AFTER_S)
    assert marker(root).exists()
    return last


def trainer_answers(last: LastDrain, ramdisk: Path, secret: bytes, port: int, now_s: float) -> None:
    """Let a job be back elsewhere for one look, at ``now_s``, and leave step 6 here."""
    (ramdisk / "trainer").mkdir(mode=0o700)
    holdings = ReadOnlyRamdisk(ramdisk / "trainer", RUN_ID)
    with TransferServer(holdings, run_id=RUN_ID, secret=secret, port=port):
        last.poll(now_s, AFTER_S)
    holdings.close()
    save_quarters(ramdisk / "0", {0: [0, 1, 2, 3]}, step=6)


def test_server_beside_no_trainer_drains_each_end_of_a_job(
    tmp_path: Path, ramdisk: Path, secret: bytes, client: TransferClient
) -> None:
    last = drained_once(tmp_path, ramdisk, client, port := free_port())
    trainer_answers(last, ramdisk, secret, port, 2 * AFTER_S)
    last.poll(3 * AFTER_S, AFTER_S)
    assert marker(tmp_path, 6).exists()


def test_server_drains_a_job_that_came_back_for_a_moment(
    tmp_path: Path, ramdisk: Path, secret: bytes, client: TransferClient
) -> None:
    """The job returns and ends for good, on other hosts, within half of ``--drain-after``."""
    last = drained_once(tmp_path, ramdisk, client, port := free_port())
    trainer_answers(last, ramdisk, secret, port, 1.4 * AFTER_S)
    last.poll(2.3 * AFTER_S, AFTER_S)
    assert not marker(tmp_path, 6).exists(), "the job may start again"
    last.poll(2.4 * AFTER_S, AFTER_S)
    assert marker(tmp_path, 6).exists()


def test_poll_drains_nothing_while_names_are_unknown(
    tmp_path: Path, ramdisk: Path, client: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    args = serve_options(tmp_path, ramdisk, "train:7411")
    last = LastDrain(args, "127.0.0.1:1", client, print, SignalFlag(), SignalFlag())
    last.poll(0, AFTER_S)
    with monkeypatch.context() as patch:
        fail_to_resolve(patch, socket.EAI_AGAIN)
        last.poll(AFTER_S, AFTER_S)
    assert not (tmp_path / "dir").exists()
    fail_to_resolve(monkeypatch, socket.EAI_NONAME)
    last.poll(2 * AFTER_S, AFTER_S)
    assert marker(tmp_path).exists()


def test_end_of_a_host_drains_where_names_stay_unknown(
    tmp_path: Path, ramdisk: Path, client: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    args = serve_options(tmp_path, ramdisk, "train:7411")
    fail_to_resolve(monkeypatch, socket.EAI_AGAIN)
    LastDrain(args, "127.0.0.1:1", client, print, SignalFlag(), SignalFlag()).at_end(0.1)
    assert marker(tmp_path).exists()


def test_end_of_a_host_drains_beside_a_resolver_that_hangs(
    tmp_path: Path, ramdisk: Path, client: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    args = serve_options(tmp_path, ramdisk, "train:7411")
    released, answers = threading.Event(), list[str]()

    def hang(*_: object, **__: object) -> None:
        released.wait(HELD_S)
        released.set()  # later calls are answered at once
        answers.append("nobody has this name")
        raise socket.gaierror(socket.EAI_NONAME, "as a test says")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", hang)
        LastDrain(args, "127.0.0.1:1", client, print, SignalFlag(), SignalFlag()).at_end(0.1)
        assert (marker(tmp_path).exists(), answers) == (True, [])
        released.set()


def test_poll_asks_all_peers_at_once_until_told_to_stop(
    tmp_path: Path, ramdisk: Path, client: TransferClient
) -> None:
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    stopping, connected = SignalFlag(), list[socket.socket]()
    with ExitStack() as opened:
        silent = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]

        def stop_once_all_are_asked() -> None:
            connected.extend(opened.enter_context(each.accept()[0]) for each in silent)
            stopping.set()

        peers = [f"127.0.0.1:{each.getsockname()[1]}" for each in silent]
        args = serve_options(tmp_path, ramdisk, "127.0.0.1:9", peers)
        last = LastDrain(args, "127.0.0.9:1", client, print, stopping, SignalFlag())
        last.poll(0, AFTER_S)
        asked = run_in_thread("stop", stop_once_all_are_asked)
        last.poll(AFTER_S, AFTER_S)
        asked.result()
        assert [has_ended(each) for each in connected] == [False] * 3
    assert not (tmp_path / "dir").exists()


def has_ended(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection, which waits for an answer else."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    "words", [["--drain-to", "/dir"], ["--drain-after", "5"], ["--drain-at-stop", "5"]]
)
def test_serve_refuses_half_of_the_drain_options(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert eckpt_here("serve", "--local-dir", "/ram", "--run-id", RUN_ID, *words) == USAGE_EXIT_CODE
    assert signal.getsignal(signal.SIGTERM) is before
    assert "need each other" in capsys.readouterr().err


def test_drain_outlives_the_reader_of_the_first_line(
    tmp_path: Path, ramdisk: Path, secret: bytes
) -> None:
    """As in `eckpt serve ... | head -1`, and after a signal to the whole group, as from Ctrl-C."""
    del secret  # its file is read by the server
    save_quarters(ramdisk, {0: [0, 1, 2, 3]})
    words = ["serve", "--local-dir", ramdisk, "--run-id", RUN_ID]
    words += ["--secret-file", tmp_path / "secret", "--drain-to", tmp_path / "dir"]
    words += ["--drain-at-stop", 0.1, "--trainers", "127.0.0.1:9"]
    server = subprocess.Popen(
        [sys.executable, JOBS / "eckpt_program.py", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert server.stdout is not None
    with server:
        assert server.stdout.readline().startswith("serving ")
        server.stdout.close()
        server.send_signal(signal.SIGTERM)
        drains = f"/proc/{server.pid}/task/{server.pid}/children"
        until_s = time.monotonic() + LONG_S
        while not (children := Path(drains).read_text().split()):
            assert time.monotonic() < until_s
            assert server.poll() is None
            time.sleep(0.05)
        # Each child begins as a shell that ignores these signals.
        while b"emergency_ckpt" not in Path(f"/proc/{children[0]}/cmdline").read_bytes():
            time.sleep(0.01)
        os.kill(int(children[0]), signal.SIGINT)
        os.kill(int(children[0]), signal.SIGTERM)
        assert server.wait(LONG_S) == 0
    assert marker(tmp_path).exists()
