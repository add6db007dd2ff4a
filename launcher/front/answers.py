"""Answers that take their time: both watch the client, and a client that leaves ends the work at the ranks."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launcher.front.errors import SERVICE_ERRORS, to_api_error
from launcher.front.replies import Renderer
from launcher.service import Job

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def abort_on_leave(job: Job, receive: Receive) -> AsyncIterator[None]:
    """Abort the job when the client disconnects meanwhile, and at the end in any case; what has ended ignores it.

    Its request must have been read: the next message then is the disconnect.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        job.abort()


class WholeAnswer(Response):
    """All of it in one body."""

    media_type = "application/json"

    def __init__(self, job: Job, renderer: Renderer) -> None:
        super().__init__()
        self._job, self._renderer = job, renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with abort_on_leave(self._job, receive):
            pieces = [piece async for piece in self._job]
        body = self._renderer.whole(self._job, pieces)
        await Response(body, media_type=self.media_type)(scope, receive, send)


class EventStream(Response):
    """Server-sent events. An error before the first piece is an ordinary answer; a later one is an event, the last."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, renderer: Renderer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._job, self._renderer = job, renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with abort_on_leave(self._job, receive):
            piece = await anext(self._job, None)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while piece is not None:
                    events = [b"data: " + chunk + b"\n\n" for chunk in self._renderer.chunks(piece)]
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                    piece = await anext(self._job, None)
                last = DONE
                if self._renderer.include_usage:
                    last = b"data: " + self._renderer.usage_chunk(self._job) + b"\n\n" + DONE
            except Exception as error:
                if not isinstance(error, SERVICE_ERRORS):
                    log.exception("a stream failed")
                last = b"data: " + to_api_error(error).body() + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
