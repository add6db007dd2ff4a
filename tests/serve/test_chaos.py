"""`phalanx chaos` at a real server."""

from pathlib import Path

from tests.serve.server import Server, ask_phalanx, keep_busy


def test_an_exception_on_demand_is_reported_as_such(checkpoint: Path) -> None:
    options = "--set", "chaos.enabled=true", "--set", "supervision.restart=false"
    with Server("--model", str(checkpoint), *options) as server:
        keep_busy(server)
        asked = ask_phalanx("chaos", "raise", "--rank", "1", "--url", server.url)
        assert (asked.returncode, asked.stdout) == (0, "raise at rank 1\n"), asked.stderr
        assert server.wait(30) == 1, server.output
        error = [line for line in server.lines if line.startswith("phalanx: error:")][-1]
        assert "rank 1 failed: ChaosError: chaos: raise on demand" in error, server.output


def test_no_faults_unless_asked_for(server: Server) -> None:
    refused = ask_phalanx("chaos", "kill", "--url", server.url)
    assert refused.returncode == 2
    assert "403" in refused.stderr and "--set chaos.enabled=true" in refused.stderr
    assert server.complete([7], 2, ignore_eos=True)["usage"]["completion_tokens"] == 2
