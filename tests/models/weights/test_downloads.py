"""torch.hub's downloads from servers that answer, and from such that do not."""

import errno
import os
import socket
import threading
import time
from http.client import HTTPConnection
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import pytest
import torch

from normscope.errors import ModelError
from normscope.models.weights import downloads

URL = "https://weights.example/models/weights.pth"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n"


class Server:
    """Answer each connection with the next of ``answers``; None keeps silent."""

    def __init__(self, *answers):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.asked, self.kept = 0, []
        threading.Thread(target=self._serve, args=[answers], daemon=True).start()

    def _serve(self, answers):
        for answer in answers:
            connection, _ = self.socket.accept()
            self.kept.append(connection)
            connection.recv(10_000)
            self.asked += 1
            if answer is not None:
                connection.sendall(answer)


@pytest.fixture
def served(monkeypatch):
    """Open a server's port wherever https is asked for."""

    servers = []  # one that nobody keeps is closed

    def open_instead(server):
        servers.append(server)

        class Plain(HTTPSHandler):
            def https_open(self, request):
                return self.do_open(
                    lambda host, timeout: HTTPConnection("127.0.0.1", server.port, timeout=timeout), request
                )

        monkeypatch.setattr("urllib.request._opener", build_opener(ProxyHandler({}), Plain))

    return open_instead


@pytest.fixture
def fetch(tmp_path):
    cached = tmp_path / "weights.pth"

    def run():
        def download():
            torch.hub.download_url_to_file(URL, str(cached), progress=False)
            return cached.read_bytes()

        return downloads.fetch(URL, cached, download, embedded="demo_wav2vec2")

    return run


def assert_refusal(fetch, reason, within):
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        fetch()
    assert time.monotonic() - start < within
    assert reason in str(caught.value)
    assert str(caught.value).endswith("which needs no network: normscope plot demo_wav2vec2.")


def test_download(served, fetch):
    server = Server(HEAD, HEAD + b"x" * 1000)
    served(server)
    assert fetch() == b"x" * 1000
    assert server.asked == 2


def test_name_of_no_host(fetch, monkeypatch):
    monkeypatch.setattr("urllib.request._opener", build_opener(ProxyHandler({})))
    assert_refusal(fetch, "asking the hub at weights.example failed with URLError", within=5)


def test_closed_port(served, fetch):
    server = Server()
    server.socket.close()
    served(server)
    assert_refusal(
        fetch,
        "weights.example failed with URLError: <urlopen error [Errno 111] Connection refused>",
        within=5,
    )


def test_server_that_falls_silent(served, fetch, monkeypatch):
    monkeypatch.setattr(downloads, "SILENCE", 0.2)
    served(Server(HEAD, HEAD + b"..."))
    assert_refusal(fetch, "broke off: TimeoutError", within=5)
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "the hub at weights.example did not answer within 3 s"),
        (
            HEAD.replace(b"application/octet-stream", b"text/html; charset=utf-8"),
            "what answers at weights.example is a",
        ),
        (HEAD.replace(b"200 OK", b"403 No"), "weights.example failed with HTTPError: HTTP Error 403"),
        (HEAD.replace(b"200 OK", b"503 No"), "weights.example failed with HTTPError: HTTP Error 503"),
    ],
)
def test_server_that_is_silent_or_refuses(served, fetch, answer, reason):
    served(Server(answer))
    assert_refusal(fetch, reason, within=5)


def test_damaged_file_in_the_cache_is_named(tmp_path):
    cached = tmp_path / "weights.pth"
    cached.write_bytes(b"half of a checkpoint")
    with pytest.raises(ModelError) as caught:
        downloads.fetch(URL, cached, lambda: torch.load(cached, weights_only=True), embedded="demo_wav2vec2")
    assert str(caught.value) == (
        f"The file {str(cached)!r} in torch.hub's cache does not load: it is damaged, or of another network "
        "(KeyError: 97). Delete it, and the next run fetches it again."
    )


def test_cache_is_where_torch_home_says(monkeypatch):
    monkeypatch.setenv("TORCH_HOME", "/somewhere/else")
    assert str(downloads.cache()) == "/somewhere/else/hub"


def test_a_disk_that_cannot_take_weights(served, tmp_path):
    served(Server(HEAD))
    cached = tmp_path / "checkpoints" / "weights.pth"

    def download():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cached))

    with pytest.raises(ModelError) as caught:
        downloads.fetch(URL, cached, download, embedded="demo_wav2vec2")
    assert str(caught.value).startswith(
        f"The download of {URL} to {cached.parent} broke off: OSError: [Errno 28] No space left on device: "
        f"{str(cached)!r}. TORCH_HOME sets another folder. Name a file with --weights FILE"
    )
