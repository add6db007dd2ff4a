"""Which variables travel with a job."""

import pytest

from launcher.config import ConfigError
from launcher.job_environment import DEFAULTS, job_environment

SHELL = {
    "NCCL_DEBUG": "INFO", "NVSHMEM_DEBUG": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "HOME": "/home/u",
    "AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "t", "MASTER_ADDR": "10.0.0.1", "PHALANX_API_KEY": "k" * 9, "EMPTY": "",
}  # fmt: skip


def test_the_allow_list() -> None:
    allowed = {"NCCL_DEBUG": "INFO", "NVSHMEM_DEBUG": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert job_environment(SHELL, []) == DEFAULTS | allowed


def test_named_ones_travel_as_they_are_or_with_the_given_value() -> None:
    found = job_environment(
        SHELL, ["HF_TOKEN", "EMPTY", "FOO=a=b", "BAR=", "NCCL_DEBUG=WARN", "RAY_JOB_STOP_WAIT_TIME_S=5"]
    )
    assert found["HF_TOKEN"] == "t"
    assert (found["EMPTY"], found["FOO"], found["BAR"]) == ("", "a=b", "")
    assert (found["NCCL_DEBUG"], found["RAY_JOB_STOP_WAIT_TIME_S"]) == ("WARN", "5")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("NOT_SET", "this shell has no such variable"),
        ("", "wants NAME or NAME=VALUE"),
        ("=x", "wants NAME or NAME=VALUE"),
        ("a b=1", "wants NAME or NAME=VALUE"),
        ("PHALANX_API_KEY", "server.api_key_file"),
        ("PHALANX_API_KEY=0123456789", "server.api_key_file"),
        ("RAY_AUTH_TOKEN=0123456789", "has its token already"),
    ],
)
def test_refused(wish: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        job_environment(SHELL, [wish])
    assert "0123456789" not in str(caught.value)
