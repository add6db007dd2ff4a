"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from launcher.errors import RequestError
from launcher.ticket import GangDown, QueueFull, RankBusy, RequestPoisoned, RequestRejected

MAX_MESSAGE = 500  # characters of a message; parts of it come from the client


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """The JSON object. Text that is no valid Unicode (a client's lone surrogate) is replaced."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        clean = {name: _clean(text) if text is not None else None for name, text in fields.items()}
        return msgspec.json.encode({"error": clean})

    def response(self, headers: dict[str, str] | None = None) -> Response:
        return Response(self.body(), self.status, headers, media_type="application/json")


def _clean(text: str) -> str:
    text = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
    return text.encode(errors="replace").decode()


def to_api_error(error: Exception) -> ApiError:
    """The answer for an exception of router or service."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, error.message, error.param, error.code)
        case RequestRejected():
            return ApiError(400, f"the model cannot run this request: {error}", code="request_rejected")
        case QueueFull():
            return ApiError(429, f"the server is busy: {error}; try again later", code="queue_full")
        case RankBusy():
            return ApiError(503, f"{error}; try again later", code="rank_busy")
        case GangDown():
            return ApiError(503, f"the model is not available: {error}", code="not_available")
        case RequestPoisoned():
            return ApiError(500, f"the request was given up: {error}", code="request_poisoned")
        case _:
            return ApiError(500, "internal error; the server's log has the details", code="internal_error")


SERVICE_ERRORS = (ApiError, RequestError, RequestRejected, RequestPoisoned, QueueFull, RankBusy, GangDown)


async def on_service_error(request: Request, error: Exception) -> Response:
    del request
    api_error = to_api_error(error)
    return api_error.response({"retry-after": "1"} if api_error.status in (429, 503) else None)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown path and wrong method, as the routing reports them."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = what.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=code).response(dict(error.headers or {}))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while sending its request: nobody reads this."""
    del request, error
    return Response(status_code=400)
