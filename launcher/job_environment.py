"""Which variables of this shell travel with a job: an allow-list, and what the user names. Values are never shown."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from launcher.config import API_KEY_VARIABLE, ConfigError

ALLOWED = ("NCCL_*", "NVSHMEM_*", "TORCH_NCCL_*", "TORCH_DISTRIBUTED_DEBUG")
STOP_WAIT_S = 20  # an orderly end takes some seconds; Ray kills after 3 unless told otherwise
DEFAULTS = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
SECRETS = {
    API_KEY_VARIABLE: "give the key's file on the cluster as server.api_key_file, or set it where Ray is started there",
    "RAY_AUTH_TOKEN": "the cluster has its token already",
}


def job_environment(environ: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """The variables of a job: defaults, the allowed ones of `environ`, and each NAME or NAME=VALUE in `named`.

    Raises ConfigError for a name that is not set here, and for secrets: Ray shows a job's variables to everyone who
    may see the cluster.
    """
    found = {name: value for name, value in environ.items() if any(fnmatchcase(name, rule) for rule in ALLOWED)}
    for wish in named:
        name, given, value = wish.partition("=")
        if not name.isidentifier():
            raise ConfigError(f"--env wants NAME or NAME=VALUE, got {name!r}")
        if name in SECRETS:
            raise ConfigError(f"{name} does not travel with a job, as Ray shows a job's variables: {SECRETS[name]}")
        if not given and name not in environ:
            raise ConfigError(f"--env {name}: this shell has no such variable; give its value with {name}=VALUE")
        found[name] = value if given else environ[name]
    return DEFAULTS | found
