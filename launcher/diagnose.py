"""`phalanx doctor` and `phalanx trace`: what the ranks of a running server do, asked over its HTTP API."""

from pathlib import Path

from rich.console import Console

from launcher.client import ServerError, ask

TIMEOUT_S = 60.0  # a hung gang's stacks take some seconds, a big gang's trace too


def run_doctor(url: str) -> int:
    """Print where every rank is, and who left the lockstep. 0: nobody has; 1: somebody has."""
    found = ask("GET", url, "/debug/doctor", timeout_s=TIMEOUT_S).json()
    print(found["text"])
    return 0 if found["lockstep"] else 1


def run_trace(url: str, target: Path, steps: int | None) -> int:
    """Write the recent steps of all ranks as a Chrome trace."""
    params = {} if steps is None else {"steps": steps}
    trace = ask("GET", url, "/debug/trace", timeout_s=TIMEOUT_S, params=params)
    try:
        target.write_bytes(trace.content)
    except OSError as error:
        raise ServerError(f"cannot write {target}: {error.strerror}") from None
    count = sum(event["ph"] == "X" for event in trace.json()["traceEvents"])
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"{count} slices written to {target}; open it in https://ui.perfetto.dev or chrome://tracing"
    )
    return 0
