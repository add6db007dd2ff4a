"""Asking a running server over HTTP, with the API key of this shell."""

import os
from typing import Any

import httpx

from launcher.config import API_KEY_VARIABLE


class ServerError(Exception):
    """The server could not be asked, or refused; the message is one line."""


def open_client(url: str, **options: Any) -> httpx.Client:
    """A client for the server at `url` (with or without /v1); https:// trusts what SSL_CERT_FILE says, if set.

    Sends the key in PHALANX_API_KEY. Raises httpx.InvalidURL.
    """
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, **options)


def ask(
    method: str,
    url: str,
    path: str,
    *,
    timeout_s: float,
    params: dict[str, int] | None = None,
    body: dict[str, Any] | None = None,
) -> httpx.Response:
    """One request to a path of the server; the answer is a 2xx. Raises ServerError."""
    try:
        with open_client(url, timeout=timeout_s) as client:
            reply = client.request(method, path, params=params, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"no answer from {url}: {error or type(error).__name__}") from None
    if not reply.is_success:
        raise ServerError(f"{reply.url} answers {reply.status_code}: {refusal(reply)}")
    return reply


def refusal(reply: httpx.Response) -> str:
    """What the server says in OpenAI's error shape, or else the beginning of its answer."""
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = " ".join(reply.text.split())[:200] or "nothing"
    return f"{message}; its key goes into {API_KEY_VARIABLE}" if reply.status_code == 401 else message
