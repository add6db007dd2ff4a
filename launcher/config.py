"""The one configuration schema: YAML files, `--set key=value`, the CLI's flags and the docs all come from it."""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dp_engine.config import EngineConfig
from ep.config import ExpertConfig
from vote.config import VoteConfig

# What goes with `engine.preset` deepinfer; settings given in the configuration win.
DEEPINFER_VOTE = {"decision": "cadence", "fast_path": False}
API_KEY_VARIABLE = "PHALANX_API_KEY"  # what clients send and, without `server.api_key_file`, the server wants


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
    gpus: float = Field(0.0, ge=0, description="GPUs reserved per rank (Ray).")
    threads: int | None = Field(None, ge=1, description="Threads per rank; default: node's cores / ranks on it.")


class RayConfig(_Section):
    """Where the ranks are placed."""

    address: str | None = Field(
        None, description="Ray cluster to join, or `auto`; default: the job's if in a job, else a local one is started."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field("PACK", description="Placement.")
    placement_timeout_s: float = Field(60.0, gt=0, description="Longest wait for the ranks' resources.")
    start_timeout_s: float = Field(600.0, gt=0, description="Longest wait for the ranks to load and report.")


class DeploymentConfig(_Section):
    """One deployment: a model, its ranks and the front."""

    model: str = Field("demo", description="Checkpoint directory (Hugging Face layout), or `demo`.")
    dp: int = Field(2, ge=1, description="Data-parallel ranks.")
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    vote: VoteConfig = VoteConfig()
    experts: ExpertConfig = ExpertConfig()
    router: RouterConfig = RouterConfig()
    ranks: RanksConfig = RanksConfig()
    ray: RayConfig = RayConfig()

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
