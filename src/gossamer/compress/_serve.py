"""A compressed or dense language model as a local service that speaks OpenAI's completions.

One request decodes at a time, the others wait in line: this is a server for a desk and for load tests, not a batching
engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from gossamer.compress._checkpoint import load_any
from gossamer.compress._decode import Decoder
from gossamer.compress._generate import generate
from gossamer.core.http import Answer, HttpError, Request, serve

_MOST_TOKENS = 512


async def start_server(folder: str | os.PathLike[str], host: str, port: int, context: int = 2048) -> asyncio.Server:
    """Load a model and listen: ``GET /v1/models``, ``POST /v1/completions``, ``POST /v1/chat/completions``.

    folder: a compressed folder, or any model that compress takes. context: positions that are held.

    Raises:
        ValueError: there is no such model. OSError: the port is taken.
    """
    loaded = load_any(os.fspath(folder))
    limit = min(context, getattr(loaded.model.config, "max_position_embeddings", context))
    service = _Service(os.path.basename(os.fspath(folder).rstrip("/")), Decoder(loaded.model, limit), loaded.tokenizer)
    return await serve(service.handle, host, port)


class _Service:
    def __init__(self, name: str, decoder: Decoder, tokenizer: Any) -> None:
        self._name, self._decoder, self._tokenizer = name, decoder, tokenizer
        self._turn = asyncio.Lock()

    async def handle(self, request: Request) -> Answer:
        if (request.method, request.path) == ("GET", "/v1/models"):
            return {"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "gossamer"}]}
        if request.method != "POST" or request.path not in ("/v1/completions", "/v1/chat/completions"):
            raise HttpError(404, f"no {request.method} {request.path}; there is POST /v1/completions, GET /v1/models")
        body = request.body
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        chat = request.path.endswith("chat/completions")
        prompt = self._prompt(body, chat)
        options = self._options(body)
        if body.get("stream"):
            return self._streamed(prompt, options, chat)
        pieces = [piece async for piece in self._pieces(prompt, options)]
        text = "".join(pieces)
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        counts = [len(self._tokenizer(part)["input_ids"]) for part in (prompt, text)]
        usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
        return {**self._frame(chat), "choices": [{"index": 0, "finish_reason": "stop", **content}], "usage": usage}

    def _prompt(self, body: dict[str, Any], chat: bool) -> str:
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise ValueError("messages must be a list that is not empty")
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be a text that is not empty")
        return prompt

    def _options(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body.get("max_tokens", body.get("max_completion_tokens", 16))
        if not isinstance(tokens, int) or not 1 <= tokens <= _MOST_TOKENS:
            raise ValueError(f"max_tokens must be a whole number from 1 to {_MOST_TOKENS}, got {tokens!r}")
        return {
            "max_new_tokens": tokens,
            "temperature": float(body.get("temperature", 0.0)),
            "top_p": body.get("top_p"),
            "seed": body.get("seed"),
        }

    def _frame(self, chat: bool) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        return {"id": f"cmpl-{time.monotonic_ns()}", "object": kind, "created": int(time.time()), "model": self._name}

    async def _streamed(self, prompt: str, options: dict[str, Any], chat: bool) -> AsyncIterator[dict[str, Any]]:
        frame = self._frame(chat)
        async for piece in self._pieces(prompt, options):
            content = {"delta": {"content": piece}} if chat else {"text": piece}
            yield {**frame, "choices": [{"index": 0, "finish_reason": None, **content}]}
        yield {**frame, "choices": [{"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}]}

    async def _pieces(self, prompt: str, options: dict[str, Any]) -> AsyncIterator[str]:
        """New text as it comes, from a thread of its own, one request at a time."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def hand_over(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> None:
            try:
                generate(self._decoder, self._tokenizer, prompt, on_text=hand_over, **options)
            finally:
                hand_over(None)

        async with self._turn:
            running = loop.run_in_executor(None, work)
            while (piece := await pieces.get()) is not None:
                yield piece
            await running


def run_server(
    folder: str | os.PathLike[str], host: str, port: int, context: int, on_ready: Callable[[str], object]
) -> None:
    """Serve until interrupted; ``on_ready(address)`` is called once requests are taken."""

    async def main() -> None:
        server = await start_server(folder, host, port, context)
        on_ready(f"http://{host}:{server.sockets[0].getsockname()[1]}")
        async with server:
            await server.serve_forever()

    with suppress(KeyboardInterrupt):
        asyncio.run(main())
