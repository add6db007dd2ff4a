"""The one configuration schema: YAML files, `--set key=value`, the CLI's flags and the docs all come from it."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dp_engine.config import EngineConfig
from ep.config import ExpertConfig
from vote.config import VoteConfig

# What goes with `engine.preset` deepinfer; settings given in the configuration win.
DEEPINFER_VOTE = {"decision": "cadence", "fast_path": False}
API_KEY_VARIABLE = "PHALANX_API_KEY"  # what clients send and, without `server.api_key_file`, the server wants


# Environment variables of a rank that phalanx sets or removes itself, and what decides on them.
DECIDED_VARIABLES = {
    "OMP_NUM_THREADS": "ranks.threads decides",
    "CUDA_VISIBLE_DEVICES": "ranks.gpus and Ray decide",
    "GLOO_SOCKET_IFNAME": "ranks.interface decides",
    "NCCL_SOCKET_IFNAME": "ranks.interface decides",
} | dict.fromkeys(
    ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "rank 0 says where the ranks meet",
)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Section):
    """The HTTP front."""

    host: str | None = Field(
        None, description="Address to listen on; default: loopback; in a cluster the node's address there."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    model_name: str | None = Field(None, description="Name in the API; default: the model directory's name.")
    max_body_mib: float = Field(8.0, gt=0, description="Larger request bodies are answered 413.")
    api_key_file: Path | None = Field(
        None, description="File with the key that clients must send; default: the variable PHALANX_API_KEY; else none."
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM); with `server.tls_key`: HTTPS.")
    tls_key: Path | None = Field(None, description="Private key of `server.tls_cert` (PEM, without a passphrase).")

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or none")
        return self


class RouterConfig(_Section):
    """Spreading requests over ranks."""

    host: str | None = Field(None, description="Address for ranks; default: loopback; in a cluster the node's.")
    max_inflight: int = Field(4096, ge=1, description="Requests in flight on all ranks; more are answered 429.")


class RanksConfig(_Section):
    """What one rank gets from its node."""

    cpus: float = Field(1.0, gt=0, description="CPUs reserved per rank (Ray).")
    gpus: float = Field(
        0.0, ge=0, le=1, description="GPUs reserved per rank (Ray): 0, 1, or a part of one that ranks are to share."
    )
    resources: dict[str, float] = Field({}, description="Other resources reserved per rank (Ray), by name.")
    threads: int | None = Field(None, ge=1, description="Threads per rank; default: node's cores / ranks on it.")
    pin: bool = Field(True, description="Keep each rank on its own cores, of one NUMA node where it can be.")
    interface: str | None = Field(
        None,
        description="Network between ranks: an interface's name, or an address range (10.1.0.0/16) that each node has "
        "an interface in; default: the interface with the node's Ray address.",
    )
    env: dict[str, str | None] = Field(
        {}, description="Environment variables of the ranks, by name; null: as in the launcher's own environment."
    )

    @field_validator("resources")
    @classmethod
    def _are_other_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name} is none of the others: use ranks.cpus and ranks.gpus")
            if amount <= 0:
                raise ValueError(f"{name}: {amount:g} is no amount")
        return resources

    @field_validator("interface")
    @classmethod
    def _is_name_or_range(cls, interface: str | None) -> str | None:
        if interface is not None and "/" in interface:
            ip_network(interface)  # a ValueError says what is wrong
        return interface

    @field_validator("env")
    @classmethod
    def _may_be_set(cls, env: dict[str, str | None]) -> dict[str, str | None]:
        for name in env:
            if name in DECIDED_VARIABLES:
                raise ValueError(f"{name} is not for you to set: {DECIDED_VARIABLES[name]}")
        return env


class RayConfig(_Section):
    """Where the ranks are placed."""

    address: str | None = Field(
        None, description="Ray cluster to join, or `auto`; default: the job's if in a job, else a local one is started."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field("PACK", description="Placement.")
    placement_timeout_s: float = Field(60.0, gt=0, description="Longest wait for the ranks' resources.")
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest wait for the ranks to report; while they load, for one of them to have loaded more.",
    )


class SupervisionConfig(_Section):
    """What happens when a gang ends unasked."""

    restart: bool = Field(True, description="Start the gang again and carry its requests over; else the server ends.")
    max_failures: int = Field(5, ge=1, description="Lives in a row without a finished request before giving a gang up.")
    backoff_s: float = Field(1.0, ge=0, description="Wait after such a life before the next one; doubles each time.")
    backoff_max_s: float = Field(30.0, ge=0, description="Longest such wait.")
    max_request_deaths: int = Field(
        2, ge=1, description="A request that was running on the rank at fault at so many ends in a row is failed."
    )
    spare: bool = Field(
        True, description="Keep the next life's processes started and waiting, about 0.3 GB a rank; not with GPUs."
    )
    crash_dir: str = Field("~/.local/state/phalanx/crashes", description="Crash reports go to folders in here.")
    crash_reports: int = Field(20, ge=0, description="Crash reports kept there; 0 writes none.")


class ChaosConfig(_Section):
    """Faults on demand (`phalanx chaos`)."""

    enabled: bool = Field(False, description="Let POST /debug/chaos kill, stop or slow down ranks: tests and drills.")


class DeploymentConfig(_Section):
    """One deployment: a model, its ranks and the front."""

    model: str = Field("demo", description="Checkpoint directory (Hugging Face layout), a .gguf file, or `demo`.")
    dp: int = Field(2, ge=1, description="Data-parallel ranks of a gang.")
    replicas: int = Field(1, ge=1, description="Gangs side by side under one router, each of `dp` ranks.")
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    vote: VoteConfig = VoteConfig()
    experts: ExpertConfig = ExpertConfig()
    router: RouterConfig = RouterConfig()
    ranks: RanksConfig = RanksConfig()
    ray: RayConfig = RayConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    chaos: ChaosConfig = ChaosConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_vote_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(vote := data.get("vote", {}), dict):
            engine = data.get("engine")
            preset = engine.get("preset") if isinstance(engine, dict) else getattr(engine, "preset", None)
            if preset == "deepinfer":
                return data | {"vote": DEEPINFER_VOTE | vote}
        return data

    @model_validator(mode="after")
    def _serve_whole_requests(self) -> Self:
        if (role := self.engine.role) != "both":
            raise ValueError(f"engine.role {role} cannot be served: engines do not hand KV to each other yet; use both")
        return self


def load_config(path: Path | None, overrides: list[str] | None = None, **flags: Any) -> DeploymentConfig:
    """Merge a YAML file, `key=value` overrides (dotted keys, YAML values) and flags, in rising order of precedence.

    Flags are given with `__` for dots (`server__port=80`); None means "not given". Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read config {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"cannot read config {path}: it is no text file") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config {path} must be a mapping of settings, not {type(loaded).__name__}")
        tree = loaded or {}
    for override in overrides or []:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set wants key=value, got {override!r}")
        try:
            _assign(tree, key.split("."), yaml.safe_load(text))
        except yaml.YAMLError:
            raise ConfigError(f"--set {key}: value {text!r} is not YAML") from None
    for key, value in flags.items():
        if value is not None:
            _assign(tree, key.split("__"), value)
    try:
        return DeploymentConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_first_error(error)) from None


def _assign(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"setting {name!r} is no section, so {'.'.join(path)} cannot be set")
        tree = child
    tree[path[-1]] = value


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key!r}"
    if first["type"] == "value_error":  # settings that do not go together; the message names them
        message = first["msg"].removeprefix("Value error, ")
        return f"setting {key!r}: {message}" if key else message
    return f"setting {key!r}: {first['msg']} (got {first['input']!r})"
