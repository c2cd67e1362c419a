"""As much of HTTP/1.1 as a local service and its load generator need, on asyncio streams.

Bodies by length or in chunks, connections kept alive, server-sent events. No TLS, no redirects, no proxies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_LARGEST_BODY = 64 << 20


@dataclass(frozen=True)
class Request:
    """A request: method, path, and the body as JSON (None where there is none)."""

    method: str
    path: str
    body: Any


class HttpError(ValueError):
    """An answer other than 200; ``status`` says which."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Answer = Mapping[str, Any] | AsyncIterator[Mapping[str, Any]]
Handler = Callable[[Request], Awaitable[Answer]]
"""Gives one JSON object, or an iterator of them, which are sent as server-sent events and ended by ``[DONE]``."""


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listen; ``server.sockets[0].getsockname()[1]`` is the port where 0 was asked for."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader, writer)) is not None:
                await _answer(handler, request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side has gone
        finally:
            writer.close()

    return await asyncio.start_server(connection, host, port, limit=1 << 20)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    line = await reader.readline()
    if not line.strip():
        return None
    try:
        method, path, _ = line.decode("latin-1").split()
        headers = await _headers(reader)
        length = int(headers.get("content-length", 0))
        if not 0 <= length <= _LARGEST_BODY:
            raise ValueError(f"a body of {length} bytes is too long")
        raw = await reader.readexactly(length)
        return Request(method, path, json.loads(raw) if raw else None)
    except ValueError as error:
        writer.write(_plain(400, {"error": {"message": f"bad request: {error}"}}))
        await writer.drain()
        return None


async def _answer(handler: Handler, request: Request, writer: asyncio.StreamWriter) -> None:
    try:
        answer = await handler(request)
    except HttpError as error:
        writer.write(_plain(error.status, {"error": {"message": str(error)}}))
    except (ValueError, TypeError, KeyError) as error:
        writer.write(_plain(400, {"error": {"message": str(error)}}))
    else:
        if isinstance(answer, Mapping):
            writer.write(_plain(200, answer))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            async for event in answer:
                writer.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
                await writer.drain()
            writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


def _plain(status: int, value: Mapping[str, Any]) -> bytes:
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}.get(status, "Error")
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
    return found


class Client:
    """Requests to one server, over connections that are kept and used again.

    Raises:
        ValueError: the address is not like ``http://127.0.0.1:8000``.
    """

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"base must be an address like http://127.0.0.1:8000, got {base!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, value: Any, on_event: Callable[[Any], object] | None = None) -> Any:
        """Send JSON; give the JSON that comes back, or hand every event of a stream to ``on_event`` and give None.

        Raises:
            HttpError: the server answered with another status than 200. OSError: it could not be reached.
        """
        body = json.dumps(value).encode()
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + body)
            status, headers = await _status(reader)
            if status != 200:
                raise HttpError(status, (await _whole(reader, headers)).decode(errors="replace")[:500])
            if on_event is None or "event-stream" not in headers.get("content-type", ""):
                answer = json.loads(await _whole(reader, headers))
            else:
                await _events(reader, headers, on_event)
                answer = None
        except BaseException:
            writer.close()
            raise
        if headers.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return answer

    def close(self) -> None:
        """Close the connections that are kept."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _status(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    line = await reader.readline()
    if not line:
        raise ConnectionResetError("the server closed the connection without an answer")
    return int(line.split()[1]), await _headers(reader)


async def _whole(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    return b"".join([part async for part in _parts(reader, headers)])


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


async def _events(reader: asyncio.StreamReader, headers: Mapping[str, str], on_event: Callable[[Any], object]) -> None:
    rest = b""
    async for part in _parts(reader, headers):
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                on_event(json.loads(data))
