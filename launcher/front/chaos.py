"""Faults on demand over HTTP: POST /debug/chaos. Off unless `chaos.enabled` is set."""

import random
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dp_engine.messages import Direction, Fault, FaultKind
from launcher.front.body import read_json
from launcher.front.errors import ApiError
from launcher.front.schemas import validate
from launcher.router import Router

MAX_BODY = 1 << 16
OFF = "faults on demand are off here; start the server with --set chaos.enabled=true to allow them"


def _rank(value: Any) -> int | Literal["random", "all"]:
    if value in ("random", "all") or (type(value) is int and value >= 0):
        return value
    raise ValueError('must be the number of a rank, "random" or "all"')


class FaultRequest(BaseModel):
    """What all kinds of faults have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: FaultKind
    rank: Annotated[Any, BeforeValidator(_rank)] = "random"
    replica: int = Field(0, ge=0)

    def fault(self) -> Fault:
        """As ranks are told it; the roster numbers it."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name not in ("rank", "replica")}
        return Fault(wake=0, **given)


class Strike(FaultRequest):
    after_steps: int = Field(0, ge=0, le=1 << 40)


class Slow(FaultRequest):
    seconds: float = Field(0.1, gt=0, le=3600)
    steps: int = Field(100, ge=1, le=1 << 40)


class Drop(FaultRequest):
    messages: int = Field(1, ge=1, le=1 << 40)
    direction: Direction = "to_router"


class Full(FaultRequest):
    steps: int = Field(100, ge=1, le=1 << 40)


class Poison(FaultRequest):
    tokens: Annotated[list[int], Field(min_length=1, max_length=1024), AfterValidator(tuple)]
    how: Literal["raise", "kill"] = "raise"


SCHEMAS: dict[str, tuple[type[FaultRequest], str]] = {
    "kill": (Strike, "the rank's process is killed"),
    "stop": (Strike, "the rank's process is stopped"),
    "raise": (Strike, "a step of the rank raises an exception"),
    "hang": (Strike, "a step of the rank never ends"),
    "slow": (Slow, "the rank's forwards take longer"),
    "drop": (Drop, "messages from or to the rank are lost"),
    "full": (Full, "the rank's free KV blocks are withheld"),
    "poison": (Poison, "a request with these token ids ends the rank that computes it, in later lives too"),
}
_COMMON = FaultRequest.model_fields.keys()


def parse_fault(body: dict[str, Any]) -> FaultRequest:
    """Raises ApiError 400 that names the parameter."""
    kind = body.get("kind")
    schema, _ = SCHEMAS.get(kind, (FaultRequest, "")) if isinstance(kind, str) else (FaultRequest, "")
    return validate(schema, body)


class ChaosDesk:
    """GET lists the kinds and their parameters, POST lets one happen."""

    def __init__(self, router: Router, enabled: bool) -> None:
        self._router = router
        self._enabled = enabled

    @property
    def route(self) -> Route:
        return Route("/debug/chaos", self.chaos, methods=["GET", "POST"])

    async def chaos(self, request: Request) -> Response:
        if request.method == "GET":
            return JSONResponse({"enabled": self._enabled, "kinds": _kinds()})
        if not self._enabled:
            raise ApiError(403, OFF, code="chaos_disabled")
        wanted = parse_fault(await read_json(request, MAX_BODY))
        ranks = self._ranks(wanted)
        for rank in ranks:
            self._router.inject(wanted.replica, rank, wanted.fault())
        return JSONResponse({"kind": wanted.kind, "replica": wanted.replica, "ranks": ranks})

    def _ranks(self, wanted: FaultRequest) -> list[int]:
        size, gangs = self._router.world_size, len(self._router.replicas)
        if wanted.replica >= gangs:
            message = f"there is no replica {wanted.replica}, only 0 to {gangs - 1}"
            raise ApiError(400, message, "replica", "invalid_value")
        if wanted.rank == "all":
            return list(range(size))
        if wanted.rank == "random":
            return [random.randrange(size)]
        if wanted.rank >= size:
            raise ApiError(400, f"there is no rank {wanted.rank}, only 0 to {size - 1}", "rank", "invalid_value")
        return [wanted.rank]


def _kinds() -> dict[str, dict[str, Any]]:
    return {
        kind: {"what": what, "parameters": [name for name in schema.model_fields if name not in _COMMON]}
        for kind, (schema, what) in SCHEMAS.items()
    }
