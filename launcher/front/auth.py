"""The API key: where it comes from, and the check in front of all endpoints but the monitoring's."""

import hmac
import os
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from launcher.config import API_KEY_VARIABLE, ConfigError
from launcher.front.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
SHORTEST = 8  # characters; less is a mistake or no secret


def take_api_key(file: Path | None) -> str | None:
    """The key that clients must send, from the file or else from the environment; None is no key.

    It is removed from the environment, so that no process started from here inherits it. Raises ConfigError, which
    never shows the key.
    """
    key = os.environ.pop(API_KEY_VARIABLE, None)
    where = API_KEY_VARIABLE
    if file is not None:
        where = f"server.api_key_file {file}"
        try:
            key = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {where}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    if key is None:
        return None
    key = key.strip()
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} is no API key: at least {SHORTEST} visible ASCII characters without spaces")
    return key


class RequireKey:
    """ASGI middleware: requests without `Authorization: Bearer KEY` are answered 401, their bodies unread."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "this server wants its API key: send it as `Authorization: Bearer KEY`"
        if "authorization" in Headers(scope=scope):
            message = "wrong API key"
        refusal = ApiError(401, message, code="invalid_api_key").response({"www-authenticate": "Bearer"})
        await refusal(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._key)  # takes the same time wherever they differ
        return same and scheme.lower() == "bearer"
