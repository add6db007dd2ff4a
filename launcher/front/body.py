"""Request bodies from the socket to a JSON object."""

import json
from typing import Any, NoReturn

from starlette.requests import Request

from launcher.front.errors import ApiError


async def read_json(request: Request, limit: int, *, optional: bool = False) -> dict[str, Any]:
    """Read a body of at most `limit` bytes; with `optional` no body is an empty object.

    Raises ApiError 413 or 400, ClientDisconnect when the client leaves.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    if optional and not size:
        return {}
    try:
        body = json.loads(b"".join(chunks), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
