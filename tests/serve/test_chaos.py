"""`phalanx chaos` at a real server."""

from tests.serve.server import Server, ask_phalanx


def test_no_faults_unless_asked_for(server: Server) -> None:
    refused = ask_phalanx("chaos", "kill", "--url", server.url)
    assert refused.returncode == 2
    assert "403" in refused.stderr and "--set chaos.enabled=true" in refused.stderr
    assert server.complete([7], 2, ignore_eos=True)["usage"]["completion_tokens"] == 2
