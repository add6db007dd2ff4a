"""The real HTTP front on a real socket, over fake ranks: an event loop of its own in a thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher.front.app import make_app
from launcher.http import bind_http, serve_http
from launcher.keys import LaunchKeys
from launcher.router import Router
from launcher.service import Service
from launcher.text import Text
from tests.fake_gang import open_link
from tests.fake_rank import FakeRank
from tests.tokenizers import write_tokenizer

MODEL = "tiny"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen within 5 s"
        time.sleep(0.005)


@cache
def small_text() -> Text:
    """The test tokenizer as the launcher loads it, with generation defaults."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), 320)
        (Path(directory) / "config.json").write_text('{"vocab_size": 320}')
        (Path(directory) / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.9}')
        return Text.load(Path(directory))


class FrontServer:
    """`with FrontServer(...) as server:`; `server.url` is its root, `server.ranks` are its fake ranks."""

    def __init__(
        self,
        world_size: int = 2,
        *,
        max_inflight: int = 256,
        max_body: int = 1 << 20,
        chaos: bool = False,
        api_key: str | None = None,
        tls: tuple[Path, Path] | None = None,
        **rank: Any,
    ) -> None:
        self._chaos = chaos
        self._world_size, self._max_inflight, self._max_body, self._rank = world_size, max_inflight, max_body, rank
        self._api_key, self._tls = api_key, tls
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.ranks: list[FakeRank] = []

    def __enter__(self) -> "FrontServer":
        self._thread.start()
        self._started.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def call(self, function: Any, *args: Any) -> None:
        """Run a function of the router on its loop."""
        self.loop.call_soon_threadsafe(function, *args)

    async def _serve(self) -> None:
        try:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            keys = LaunchKeys.generate()
            self.router = Router(self._world_size, max_inflight=self._max_inflight)
            link = await open_link(self.router, keys)
            self.service = Service(small_text(), self.router, MODEL, block_size=16)
            sock = bind_http("127.0.0.1", 0)
            self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{sock.getsockname()[1]}"
            with ExitStack() as stack:
                for rank in range(self._world_size):
                    fake = FakeRank(link.endpoint, keys.for_rank(), rank, self._world_size, **self._rank)
                    self.ranks.append(stack.enter_context(fake))
                await link.wait_ready(10)
                self._started.set_result(None)
                app = make_app(self.service, self._max_body, api_key=self._api_key, chaos=self._chaos)
                await serve_http(app, sock, self._stop, self._tls)
                await self.router.close()
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise
