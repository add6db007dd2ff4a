"""The operator's endpoints: health, readiness, status, metrics, and what the schedulers may do."""

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.front.body import read_json
from launcher.front.errors import ApiError
from launcher.front.schemas import DoctorRequest, PauseRequest, TraceRequest, validate
from launcher.metrics import RouterCollector
from launcher.router import GangDown, Router
from vote.observers import Observers
from vote.recorder import MAX_ENTRIES
from vote.report import examine
from vote.trace import chrome_trace

MAX_BODY = 1 << 16
STUCK_S = 1.0  # a rank that is where it was this long ago is stuck


class Admin:
    """The operator's endpoints of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._looking = asyncio.Lock()  # one at a time: it costs the machine something
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RouterCollector(router))

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/status", self.status),
            Route("/drain", self.drain, methods=["POST"]),
            Route("/pause", self.pause, methods=["GET", "POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/debug/doctor", self.doctor),
            Route("/debug/trace", self.trace),
        ]

    async def health(self, request: Request) -> Response:
        """The process is up."""
        del request
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Requests are taken now; while paused they wait."""
        del request
        if (reason := self._router.unready_reason) is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        paused = {"paused": self._router.paused} if self._router.paused != "none" else {}
        return JSONResponse({"status": "ready", "ranks": self._router.world_size} | paused)

    async def status(self, request: Request) -> Response:
        """The gangs and the requests in flight, for people and for scripts."""
        del request
        router = self._router
        replicas = [
            {
                "replica": place.number,
                "state": place.state,
                "reason": None if place.serving else place.unready_reason,
                "ranks": place.world_size,
                "epoch": place.link.epoch if place.link is not None else 0,
                "restarts": place.restarts,
                "inflight": len(place.link.books) if place.link is not None else 0,
            }
            for place in router.replicas
        ]
        requests = {"inflight": router.inflight, "waiting": router.num_waiting, "suspects": router.num_suspects}
        return JSONResponse({"replicas": replicas, **requests, "paused": router.paused, "draining": router.draining})

    async def drain(self, request: Request) -> Response:
        """No new requests from now on; when those in flight have ended, so does the server."""
        del request
        self._router.drain()
        return JSONResponse({"draining": True, "inflight": self._router.inflight}, 202)

    def _observers(self, replica: int) -> Observers:
        """Raises ApiError or GangDown."""
        places = self._router.replicas
        if replica >= len(places):
            raise ApiError(400, f"there is no gang {replica} here, only 0 to {len(places) - 1}", "replica")
        if (link := places[replica].link) is None:
            raise GangDown(places[replica].unready_reason)
        return link.observers()

    async def doctor(self, request: Request) -> Response:
        """Are the ranks of a gang in lockstep? Two looks at them from outside, which works while they hang."""
        observers = self._observers(validate(DoctorRequest, dict(request.query_params)).replica)
        async with self._looking:
            before = await asyncio.to_thread(observers.look)
            await asyncio.sleep(STUCK_S)
            report = examine(before, await asyncio.to_thread(observers.look, stack=True))
        ranks = [{"rank": rank, "words": words} for rank, words in sorted(report.culprits.items())]
        return JSONResponse({"lockstep": not ranks, "culprits": ranks, "step": report.step, "text": report.text})

    async def trace(self, request: Request) -> Response:
        """The recent steps of all ranks as a Chrome trace; `steps` limits how many."""
        query = validate(TraceRequest, dict(request.query_params))
        observers = self._observers(query.replica)
        async with self._looking:
            seen = await asyncio.to_thread(observers.look, MAX_ENTRIES)
            text = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(seen, query.steps)))
        return Response(text, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def pause(self, request: Request) -> Response:
        """POST sets the mode, both methods answer it."""
        if request.method == "POST":
            body = validate(PauseRequest, await read_json(request, MAX_BODY, optional=True))
            self._router.pause(body.mode)
        return JSONResponse({"mode": self._router.paused})

    async def resume(self, request: Request) -> Response:
        del request
        self._router.pause("none")
        return JSONResponse({"mode": self._router.paused})

    async def reset_prefix_cache(self, request: Request) -> Response:
        del request
        self._router.reset_prefix_cache()
        return JSONResponse({"status": "ok"})
