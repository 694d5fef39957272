"""A loopback server for tests: made-up completions, or a proxy in front of a real server, with
faults on the way.
"""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]
FAULTS = ("status", "busy", "cut", "half", "torn", "slow", "no choice", "aborted", "list")


class Loopback(ThreadingHTTPServer):
    """Answers by `reply`; each different body meets the faults of `plan(nth body)` first.

    `seen` counts requests by body, `given` the whole answers by body, `at_once` the most requests
    under way together.
    """

    daemon_threads = True

    def __init__(
        self,
        reply: Callable[[str, bytes, Any], Reply],
        plan: Callable[[int], list[str]] = lambda _: [],
        sleep: float = 1.0,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.plan, self.sleep = reply, plan, sleep
        self.faults: dict[bytes, list[str]] = {}
        self.seen, self.given, self.met = Counter[bytes](), Counter[bytes](), Counter[str]()
        self.lock, self.under_way, self.at_once = threading.Lock(), 0, 0
        self.headers: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def fault(self, body: bytes) -> str | None:
        with self.lock:
            self.seen[body] += 1
            left = self.faults.setdefault(body, self.plan(len(self.faults)))
            found = left.pop(0) if left else None
            self.met[found or "none"] += 1
            return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Loopback

    def do_GET(self) -> None:
        self._send(*self.server.reply(self.path, b"", self.headers))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        with server.lock:
            server.under_way += 1
            server.at_once = max(server.at_once, server.under_way)
            server.headers.append(self.headers)
        try:
            self._answer(body, server.fault(body))
        finally:
            with server.lock:
                server.under_way -= 1

    def _answer(self, body: bytes, fault: str | None) -> None:
        if fault in ("status", "busy"):
            return self._send({"status": 500, "busy": 429}[fault], b'{"error": "on purpose"}')
        if fault == "cut":
            self.close_connection = True
            return None
        if fault == "slow":
            time.sleep(self.server.sleep)
        status, data = self.server.reply(self.path, body, self.headers)
        if fault == "half":  # the length says more than comes
            self._head(status, len(data))
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        if fault == "torn":  # whole by its length, but no JSON
            return self._send(status, data[: len(data) // 2])
        if fault == "no choice":
            return self._send(200, b'{"choices": []}')
        if fault == "aborted":
            return self._send(200, b'{"choices": [{"text": "x", "finish_reason": "abort"}]}')
        if fault == "list":
            return self._send(200, b"[1]")
        if fault != "slow":
            with self.server.lock:
                self.server.given[body] += 1
        return self._send(status, data)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, data: bytes) -> None:
        self._head(status, len(data))
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def forward(port: int) -> Callable[[str, bytes, Any], Reply]:
    """Return a reply that asks a server on another port."""

    def reply(path: str, body: bytes, headers: Any) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        kept = {"Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, body or None, kept)
        response = connection.getresponse()
        try:
            return response.status, response.read()
        finally:
            connection.close()

    return reply


def plain(found: dict[str, Any]) -> Reply:
    return 200, json.dumps(found).encode()


@contextmanager
def serving(server: Loopback) -> Iterator[Loopback]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
