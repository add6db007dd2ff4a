"""What a burst of requests comes to: throughput, time to first token, gaps between tokens."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from bench.client import Exchange


class BadAnswer(RuntimeError):
    """A request failed or its token count is wrong; the message is one line."""


@dataclass(frozen=True)
class Timeline:
    """When one answer's tokens arrived, in seconds since the burst began."""

    sent: float
    arrivals: list[float]  # one per event that carries text; a token held back arrives with the next
    tokens: int


@dataclass(frozen=True)
class Summary:
    """One burst, or the medians of several. Times in milliseconds."""

    tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


def read_events(exchange: Exchange) -> list[tuple[float, bytes]]:
    """Server-sent events of a streamed body with the time at which each was complete."""
    events = []
    rest = b""
    for at, piece in exchange.pieces:
        *complete, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        events += [(at, event.removeprefix(b"data:").strip()) for event in complete if event.startswith(b"data:")]
    return events


def timeline(exchange: Exchange, wanted_tokens: int) -> Timeline:
    """Check one exchange and reduce it to its arrivals. Raises BadAnswer."""
    if exchange.error is not None:
        raise BadAnswer(exchange.error)
    if exchange.status != 200:
        body = b"".join(piece for _, piece in exchange.pieces)
        raise BadAnswer(f"HTTP status {exchange.status}: {body[:300].decode(errors='replace')}")
    events = read_events(exchange)
    if not events or events[-1][1] != b"[DONE]":
        raise BadAnswer("the stream ended without [DONE]")
    arrivals, tokens = [], None
    for at, text in events[:-1]:
        event = json.loads(text)
        if "error" in event:
            raise BadAnswer(f"the stream ended with an error: {event['error']}")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        if any(choice["text"] or choice["finish_reason"] is None for choice in event["choices"]):
            arrivals.append(at)
    if tokens != wanted_tokens:
        raise BadAnswer(f"wanted {wanted_tokens} tokens, usage says {tokens}")
    return Timeline(exchange.sent, arrivals, tokens)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile (the smallest value with at least `share` of all at or below it); 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100 * len(ordered)) // 100) - 1)]


def summarise(timelines: Sequence[Timeline]) -> Summary:
    """One burst. The clock of the throughput runs from the first request sent to the last token received."""
    elapsed = max(line.arrivals[-1] for line in timelines) - min(line.sent for line in timelines)
    first = [1e3 * (line.arrivals[0] - line.sent) for line in timelines]
    gaps = [
        1e3 * (later - earlier)
        for line in timelines
        for earlier, later in zip(line.arrivals, line.arrivals[1:], strict=False)
    ]
    return Summary(
        tok_s=sum(line.tokens for line in timelines) / elapsed,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(gaps, 0.5),
        itl_p99=percentile(gaps, 0.99),
    )


def median_of(bursts: Sequence[Summary]) -> Summary:
    """Each figure's median over the bursts."""
    rows = [asdict(burst) for burst in bursts]
    return Summary(**{field.name: statistics.median(row[field.name] for row in rows) for field in fields(Summary)})
