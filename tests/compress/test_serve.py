"""The service gives what the library gives, in OpenAI's form, whole and in pieces."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gossamer.compress import _serve, generate
from gossamer.core.http import Client, HttpError


@pytest.fixture(scope="module")
def loaded():
    """A tiny random model over bytes."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return SimpleNamespace(model=LlamaForCausalLM(config).eval(), tokenizer=tokenizer)


def asked(loaded, monkeypatch, conversation):
    monkeypatch.setattr(_serve, "load_any", lambda folder: loaded)

    async def main():
        server = await _serve.start_server("some/model", "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            return await conversation(client)
        finally:
            client.close()
            server.close()

    return asyncio.run(main())


def test_completions_are_those_of_the_library_whole_and_in_pieces(loaded, monkeypatch):
    expected = generate(loaded.model, loaded.tokenizer, "hello", max_new_tokens=12).text

    async def conversation(client):
        body = {"prompt": "hello", "max_tokens": 12}
        whole = await client.post("/v1/completions", body)
        pieces = []
        await client.post("/v1/completions", {**body, "stream": True}, pieces.append)
        both = await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(2)))
        return whole, pieces, both

    whole, pieces, both = asked(loaded, monkeypatch, conversation)
    assert whole["choices"][0]["text"] == expected
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    assert [answer["choices"][0]["text"] for answer in both] == [expected, expected]
    assert whole["usage"]["prompt_tokens"] == 5


def test_chats_use_the_models_template(loaded, monkeypatch):
    expected = generate(loaded.model, loaded.tokenizer, "user: hi\n", max_new_tokens=8).text

    async def conversation(client):
        return await client.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        )

    assert asked(loaded, monkeypatch, conversation)["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt must be a text"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens must be a whole number"),
        ("/v1/completions", [], "must be a JSON object"),
        ("/v1/chat/completions", {"messages": []}, "messages must be a list"),
        ("/v1/nothing", {}, "no POST /v1/nothing"),
        ("/v1/completions", {"prompt": "x" * 500, "max_tokens": 4}, "positions"),
    ],
)
def test_wrong_requests_are_answered_with_what_is_wrong(loaded, monkeypatch, path, body, message):
    async def conversation(client):
        with pytest.raises(HttpError, match=message):
            await client.post(path, body)

    asked(loaded, monkeypatch, conversation)
