"""Posts JSON until it is answered: retries with back-off, no redirects, no key in errors."""

import http.client
import json
import logging
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dflash_lightning.errors import UserError

log = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_LONGEST_WAIT, _SAY_EVERY = 60.0, 30.0
"""Seconds."""


class Refused(Exception):
    """The server won't answer this request, however often it is asked."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status}: {reason}")
        self.status = status


@dataclass
class Client:
    """JSON over HTTP with retries; one connection a thread and server, kept open.

    Args:
        urls: Base addresses, such as http://localhost:8000/v1; requests take turns.
        key: Sent as a bearer token if given; never shown.
        timeout: Seconds to wait for the server to send something.
        retries: How often a failed request is sent again, at growing intervals.
        first_wait: Seconds before the first of these; doubled each time, up to a minute.
    """

    urls: list[str]
    key: str = field(default="", repr=False)
    timeout: float = 600.0
    retries: int = 8
    first_wait: float = 1.0

    def __post_init__(self) -> None:
        """Check the addresses."""
        self._local, self._turn, self._lock = threading.local(), 0, threading.Lock()
        self._stopped, self._open = threading.Event(), set[http.client.HTTPConnection]()
        self._random = random.Random()  # not the run's seed: machines must not retry in step
        self.sent, self.failed, self._said = 0, 0, 0.0
        self.key = self.key.strip()
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UserError(f"data.answers.url: {_shown(url)} is no http(s) address")
            if parts.username or parts.password:
                raise UserError("data.answers.url: give the key by api_key_env, not in the address")

    def stop(self) -> None:
        """Cut every request under way, and send none again."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send `body` (None: GET) until a whole JSON object comes back, and return it.

        Raises:
            Refused: The server said no (a status of 4xx).
            UserError: It failed in every try, or was stopped.
        """
        problem = ""
        for attempt in range(self.retries + 1):
            url = self._next_url()
            try:
                return self._once(url, path, body)
            except Refused as error:
                if error.status not in RETRIED:
                    raise
                problem = str(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = self._clean(f"{type(error).__name__}: {error}".rstrip(": "))
            if self._stopped.is_set():
                break
            self._failed(url, problem)
            if attempt < self.retries:
                wait = min(self.first_wait * 2**attempt, _LONGEST_WAIT) * self._random.uniform(
                    0.5, 1.5
                )
                self._stopped.wait(wait)
        raise UserError(
            f"data.answers.url: {_shown(url)} failed {attempt + 1} times, at last with "
            f"{problem}; what was answered is kept: start again to go on"
        )

    def _next_url(self) -> str:
        with self._lock:
            self._turn += 1
            self.sent += 1
            return self.urls[self._turn % len(self.urls)]

    def _failed(self, url: str, problem: str) -> None:
        """Count a failure, and say so twice a minute at most."""
        with self._lock:
            self.failed += 1
            if time.monotonic() - self._said < _SAY_EVERY and self._said:
                return
            self._said = time.monotonic()
            failed, sent = self.failed, self.sent
        log.warning(
            "%s: %s; sent again (%d of %d requests failed)", _shown(url), problem, failed, sent
        )

    def _clean(self, text: str) -> str:
        """Return text on one line, without the key."""
        line = " ".join(text.split())[:300]
        return line.replace(self.key, "***") if self.key else line

    def _once(self, url: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = self._connection(url)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(
                "GET" if body is None else "POST",
                urlsplit(url).path.rstrip("/") + path,
                None if body is None else json.dumps(body),
                headers,
            )
            response = connection.getresponse()
            text = response.read().decode("utf-8")
            if response.will_close:
                connection.close()
        except BaseException:
            connection.close()
            raise
        if response.status >= 300:
            raise Refused(response.status, self._clean(text) or response.reason)
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("the answer is no JSON object")
        return found

    def _connection(self, url: str) -> http.client.HTTPConnection:
        kept: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("kept", {})
        if url not in kept:
            parts = urlsplit(url)
            kind = (
                http.client.HTTPSConnection
                if parts.scheme == "https"
                else http.client.HTTPConnection
            )
            kept[url] = kind(str(parts.hostname), parts.port, timeout=self.timeout)
            with self._lock:
                self._open.add(kept[url])
        return kept[url]


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
