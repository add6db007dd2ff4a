"""The files of examples/deploy and the shipped configurations say what phalanx and Ray understand."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.config import DeploymentConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
RAY_PIN = re.findall(r"^ray(?:\[\w+\])?==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture(scope="module")
def kuberay() -> dict[str, Any]:
    """Documents by kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kuberay-rayjob.yaml").read_text()))
    assert all(document["apiVersion"] and document["metadata"]["name"] for document in documents)
    return {document["kind"]: document for document in documents}


@pytest.fixture
def deployment(kuberay: dict[str, Any], tmp_path: Path) -> DeploymentConfig:
    """The configuration inside the ConfigMap."""
    path = tmp_path / "deployment.yaml"
    path.write_text(kuberay["ConfigMap"]["data"]["deployment.yaml"])
    return load_config(path)


def pods(kuberay: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    cluster = kuberay["RayJob"]["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"], workers["template"]


def test_the_job_serves_the_mounted_configuration(kuberay: dict[str, Any], deployment: DeploymentConfig) -> None:
    program, config = kuberay["RayJob"]["spec"]["entrypoint"].rsplit(" ", 1)
    assert program == "python -m launcher serve"
    wanted = [config, deployment.model, str(deployment.server.api_key_file)]
    for pod in pods(kuberay):
        [container] = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == volumes
        assert all(any(path.startswith(mount["mountPath"] + "/") for mount in mounts) for path in wanted)
    assert Path(config).name in kuberay["ConfigMap"]["data"]


def test_the_ranks_fit_on_the_workers(kuberay: dict[str, Any], deployment: DeploymentConfig) -> None:
    [workers] = kuberay["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = pods(kuberay)[1]["spec"]["containers"][0]["resources"]["limits"]
    assert deployment.dp * deployment.ranks.gpus <= workers["replicas"] * limits["nvidia.com/gpu"]
    assert deployment.dp * deployment.ranks.cpus <= workers["replicas"] * float(limits["cpu"])
    assert kuberay["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_service_leads_to_the_server(kuberay: dict[str, Any], deployment: DeploymentConfig) -> None:
    head, _ = pods(kuberay)
    service = kuberay["Service"]["spec"]
    [port] = service["ports"]
    assert port["targetPort"] == deployment.server.port
    assert deployment.server.port in [port["containerPort"] for port in head["spec"]["containers"][0]["ports"]]
    selector = dict(service["selector"])
    assert selector.pop("ray.io/node-type") == "head", "KubeRay's own label of the head, where the job runs"
    assert selector.items() <= head["metadata"]["labels"].items()


def test_ray_is_the_pinned_one_everywhere(kuberay: dict[str, Any]) -> None:
    assert kuberay["RayJob"]["spec"]["rayClusterSpec"]["rayVersion"] == RAY_PIN
    assert f"FROM rayproject/ray:{RAY_PIN}-py3" in (DEPLOY / "Dockerfile").read_text()


def test_the_environment_of_the_job_is_yaml_in_yaml(kuberay: dict[str, Any]) -> None:
    environment = yaml.safe_load(kuberay["RayJob"]["spec"]["runtimeEnvYAML"])
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 10


def test_ray_accepts_its_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY / "ray-up.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    [nodes] = prepared["available_node_types"].values()
    assert (nodes["min_workers"], nodes["max_workers"]) == (2, 2)
    with pytest.raises(Exception, match="Additional properties"):
        validate_config(prepared | {"head_ip": "10.0.0.1"})


def test_the_slurm_script_is_bash() -> None:
    done = subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "gpus", "nodes"), [("qwen3-30b-a3b-8gpu", 8, 1), ("deepseek-v3-4x8", 32, 4), ("two-node-cpu", 0, 2)]
)
def test_shipped_configurations_are_what_their_names_say(name: str, gpus: int, nodes: int) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert config.dp * config.ranks.gpus == gpus
    if not gpus:
        assert (config.dp, config.ray.strategy) == (nodes, "STRICT_SPREAD")
    assert config.server.host is None, "the node's address in a cluster, loopback on a laptop"
