"""Messages between controller and agents: one JSON object a line, over TCP."""

from __future__ import annotations

import asyncio
import json
from typing import Any


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None where the other side has gone.

    Raises:
        ValueError: a line is no JSON object.
    """
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    if not line:
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Send a message; what cannot be delivered is noticed by whoever reads."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")
