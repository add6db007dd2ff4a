"""`phalanx doctor` and `phalanx trace`: what the ranks of a running server do, asked over its HTTP API."""

from pathlib import Path

import httpx
from rich.console import Console

TIMEOUT_S = 60.0  # a hung gang's stacks take some seconds, a big gang's trace too


class DiagnoseError(Exception):
    """The server could not be asked; the message is one line."""


def run_doctor(url: str) -> int:
    """Print where every rank is, and who left the lockstep. 0: nobody has; 1: somebody has."""
    found = _get(url, "/debug/doctor", {}).json()
    print(found["text"])
    return 0 if found["lockstep"] else 1


def run_trace(url: str, target: Path, steps: int | None) -> int:
    """Write the recent steps of all ranks as a Chrome trace."""
    trace = _get(url, "/debug/trace", {} if steps is None else {"steps": steps})
    try:
        target.write_bytes(trace.content)
    except OSError as error:
        raise DiagnoseError(f"cannot write {target}: {error.strerror}") from None
    count = sum(event["ph"] == "X" for event in trace.json()["traceEvents"])
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{count} slices written to {target}; open it in https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


def _get(url: str, path: str, params: dict[str, int]) -> httpx.Response:
    try:
        reply = httpx.get(f"{url.rstrip('/')}{path}", params=params, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DiagnoseError(f"no answer from {url}: {error or type(error).__name__}") from None
    if reply.status_code != 200:
        raise DiagnoseError(f"{url}{path} answers {reply.status_code}: {message_of(reply)}")
    return reply


def message_of(reply: httpx.Response) -> str:
    """What an answer that is an error says."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return reply.text[:200] or "nothing"
