"""Tokenizer, chat template and the socket of the front."""

import asyncio
import json
import shutil
import socket
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from launcher.config import ConfigError
from launcher.errors import RequestError
from launcher.http import bind_http, serve_http
from launcher.text import GenerationDefaults, Text
from tests.front_server import small_text
from tests.tokenizers import write_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 280)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return tmp_path


def test_vocabulary_is_the_models(checkpoint: Path) -> None:
    text = Text.load(checkpoint)
    assert text.vocab_size == 300
    assert text.defaults == GenerationDefaults(1.0, 1.0, 0)
    assert text.decode(text.encode("Größe 🙂", 99)) == "Größe 🙂"


def test_truncation_in_the_file_is_ignored(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(saved))
    assert len(Text.load(checkpoint).encode("many words " * 20, 999)) > 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "cannot read .*config.json"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "must be a JSON object"),
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", "{", "tokenizer"),
    ],
)
def test_broken_checkpoint_is_one_line(checkpoint: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Text.load(checkpoint)
    assert "\n" not in str(caught.value)


def test_checkpoint_code_is_never_run(checkpoint: Path) -> None:
    trap = checkpoint / "ran"
    (checkpoint / "tokenization_trap.py").write_text(f"open({str(trap)!r}, 'w')\nclass Trap: pass\n")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "tokenization_trap.Trap"]}, "tokenizer_class": "Trap"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        Text.load(checkpoint)
    except ConfigError:
        pass
    finally:
        assert not trap.exists()


def test_chat_template_is_sandboxed_and_may_be_missing(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages.__class__.__base__.__subclasses__() }}"
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="chat template refuses") as caught:
        Text.load(checkpoint).render_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    del config["chat_template"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    bare = Text.load(checkpoint)
    assert not bare.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        bare.render_chat([{"role": "user", "content": "x"}])


def test_template_refuses_a_role() -> None:
    with pytest.raises(RequestError, match="unknown role king"):
        small_text().render_chat([{"role": "king", "content": "x"}])


@pytest.mark.parametrize("unit", ["word ", "x", "🙂", " "])
def test_hopeless_text_is_refused_at_once(unit: str) -> None:
    """8 MB would take seconds to encode, on the loop that serves everybody else."""
    text = unit * (8_000_000 // len(unit.encode()))
    begin = time.monotonic()
    with pytest.raises(RequestError, match="more than 500 tokens") as caught:
        small_text().encode(text, 500)
    assert time.monotonic() - begin < 1
    assert caught.value.code == "context_length_exceeded"


def test_limit_is_exact() -> None:
    text = small_text()
    words = "word " * 30_000  # longer than a piece, so that counting in pieces is tried
    count = len(text.encode(words, 10**6))
    assert len(text.encode(words, count)) == count
    with pytest.raises(RequestError, match=f"the prompt has {count} tokens"):
        text.encode(words, count - 1)


# ---- the socket


def test_port_in_use_is_one_line() -> None:
    with bind_http("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            bind_http("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_foreign_address_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on .*{host}"):
        bind_http(host, 0)


def test_stop_is_orderly_and_quick() -> None:
    """A request in progress is finished, an endless one is given up after the grace, the port is free afterwards."""

    async def endless(request: Request) -> PlainTextResponse:
        del request
        await asyncio.sleep(60)
        return PlainTextResponse("late")

    async def short(request: Request) -> PlainTextResponse:
        del request
        await asyncio.sleep(0.5)
        return PlainTextResponse("done")

    async def test() -> None:
        app = Starlette(routes=[Route("/endless", endless), Route("/short", short)])
        sock = bind_http("127.0.0.1", 0)
        port = sock.getsockname()[1]
        stop = asyncio.Event()
        serving = asyncio.create_task(serve_http(app, sock, stop))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            tasks = [asyncio.create_task(client.get(path)) for path in ("/short", "/endless")]
            await asyncio.sleep(0.2)
            begin = time.monotonic()
            stop.set()
            await serving
            assert time.monotonic() - begin < 4
            assert (await tasks[0]).text == "done"
            late = (await asyncio.gather(tasks[1], return_exceptions=True))[0]
            assert isinstance(late, httpx.HTTPError) or late.status_code == 500
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))

    asyncio.run(test())


def test_fast_tokenizer_is_needed(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "bare"
    target.mkdir()
    shutil.copy(checkpoint / "config.json", target)
    with pytest.raises(ConfigError, match="tokenizer"):
        Text.load(target)
