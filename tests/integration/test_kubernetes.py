"""The manifests of deploy/kubernetes are valid by the published schemas, and agree with the code and the image."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

import tdserve  # noqa: E402
from tdserve.base.config import DEFAULT_PORT, ClientConfig, ServerConfig  # noqa: E402
from tdserve.base.server_options import parse_bytes  # noqa: E402
from tdserve.cli.main import cli  # noqa: E402
from tdserve.cli.serving.health import CHECK_TIMEOUT_S  # noqa: E402
from tdserve.client.cluster.servers.membership import read_membership  # noqa: E402

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes"
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
"""The oldest version of Kubernetes that the manifests support, and the newest with published schemas."""

PYTHON_START_S = 2.0
TOKEN = "a token\n"


def load(path: Path) -> list[dict[str, Any]]:
    """Reads the documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def merge(into: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest with a patch applied: values replace values; if both are mappings, they are merged."""
    merged = dict(into)
    for key, value in patch.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(folder: Path) -> dict[str, dict[str, Any]]:
    """Applies a kustomization, as far as the ones here go; returns the manifests by kind, one of each."""
    (settings,) = load(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "replicas", "patches", "secretGenerator", "generatorOptions"}
    assert settings.keys() <= known
    found: dict[str, dict[str, Any]] = {}
    for resource in settings["resources"]:
        path = folder / resource
        found |= build(path) if path.is_dir() else {each["kind"]: each for each in load(path)}
    for secret in settings.get("secretGenerator", []):
        assert settings["generatorOptions"] == {"disableNameSuffixHash": True}
        data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in secret["files"]}
        metadata = {"name": secret["name"]}
        found["Secret"] = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
    for patch in (each for patches in settings.get("patches", []) for each in load(folder / patches["path"])):
        found[patch["kind"]] = merge(found[patch["kind"]], patch)
    for replicas in settings.get("replicas", []):
        assert found["StatefulSet"]["metadata"]["name"] == replicas["name"]
        found["StatefulSet"]["spec"]["replicas"] = replicas["count"]
    return found


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests, with a token."""
    folder = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(MANIFESTS, folder, ignore=shutil.ignore_patterns("token"))
    (folder / "base" / "token").write_text(TOKEN)
    return folder


@pytest.fixture(scope="module")
def shards(copied: Path) -> dict[str, dict[str, Any]]:
    """The manifests of several servers."""
    return build(copied / "shards")


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The manifest of a client."""
    (found,) = load(MANIFESTS / "client.yaml")
    return found


@pytest.fixture(scope="module")
def checkpoint_job() -> dict[str, Any]:
    """The command that the manifest of checkpoints runs each time, and the name of its claim."""
    claim, cron = load(MANIFESTS / "checkpoint-cronjob.yaml")
    found: dict[str, Any] = cron["spec"]["jobTemplate"]
    (named,) = [each for each in pod_of(found)["volumes"] if each["name"] == "checkpoints"]
    assert named["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    return found


def pod_of(manifest: dict[str, Any]) -> Any:
    """Returns the part of a manifest that is about its pods."""
    return manifest["spec"]["template"]["spec"]


def variables_of(pod: Any) -> dict[str, str]:
    """Returns the variables of a pod's only container, with those of the image."""
    (container,) = pod["containers"]
    image = "\n".join(re.findall(r"^ENV ((?:.*\\\n)*.*)", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE))
    return dict(re.findall(r"(TDSERVE_\w+)=(\S+)", image)) | {each["name"]: each["value"] for each in container["env"]}


def mounts_of(pod: Any) -> dict[str, str]:
    """Returns the paths of volumes by name."""
    return {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", ["base", "shards"])
def test_manifests_when_validated_then_fit_the_published_schemas(copied: Path, overlay: str, version: str) -> None:
    manifests = build(copied / overlay)
    assert manifests.keys() == {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Secret"}
    others = (*load(copied / "client.yaml"), *load(copied / "checkpoint-cronjob.yaml"))
    for manifest in (*manifests.values(), *others):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_manifest_when_a_field_is_misspelt_then_the_schemas_refuse_it(shards: dict[str, dict[str, Any]]) -> None:
    manifest = deepcopy(shards["StatefulSet"])
    pod_of(manifest)["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["base", "shards"])
def test_overlay_when_kustomize_builds_it_then_the_manifests_are_the_same(copied: Path, overlay: str) -> None:
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(program[0]) is None:
        pytest.skip("needs kustomize or kubectl")
    text = subprocess.run([*program, copied / overlay], check=True, capture_output=True, text=True, timeout=60.0).stdout
    assert {each["kind"]: each for each in yaml.safe_load_all(text)} == build(copied / overlay)


def test_ports_when_read_then_are_those_of_the_code(shards: dict[str, dict[str, Any]]) -> None:
    (port,) = shards["Service"]["spec"]["ports"]
    (container,) = pod_of(shards["StatefulSet"])["containers"]
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": DEFAULT_PORT, "protocol": "TCP"}]
    assert port["port"] == DEFAULT_PORT
    policy = shards["NetworkPolicy"]["spec"]
    for rule in (*policy["ingress"], *policy["egress"]):
        (allowed,) = rule["ports"]
        assert allowed["port"] <= DEFAULT_PORT <= allowed["endPort"] == 65535


def test_server_when_its_variables_are_read_then_serves_its_volume_with_the_token_of_the_secret(
    shards: dict[str, dict[str, Any]],
) -> None:
    pod = pod_of(shards["StatefulSet"])
    variables, mounts = variables_of(pod), mounts_of(pod)
    assert variables.keys() - {"TDSERVE_FAIL_DELAY_S"} <= {
        f"TDSERVE_{each.name.upper()}" for each in fields(ServerConfig)
    }
    config = ServerConfig.from_env(variables).validate()
    assert (config.port, config.root, config.insecure) == (DEFAULT_PORT, mounts["data"], False)
    assert pod["containers"][0]["args"] == ["serve"]
    (secret,) = [each["secret"] for each in pod["volumes"] if each["name"] == "token"]
    assert secret["secretName"] == shards["Secret"]["metadata"]["name"]
    assert config.token_file in {f"{mounts['token']}/{name}" for name in shards["Secret"]["data"]}
    assert base64.b64decode(shards["Secret"]["data"]["token"]).decode() == TOKEN
    assert config.grace_s + 5.0 <= pod["terminationGracePeriodSeconds"]
    (claim,) = shards["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mounts.keys() == {claim["metadata"]["name"]} | {each["name"] for each in pod["volumes"]}
    (shared,) = [each["emptyDir"] for each in pod["volumes"] if mounts[each["name"]] == "/dev/shm"]
    assert shared["medium"] == "Memory"
    memory = parse_bytes(pod["containers"][0]["resources"]["limits"]["memory"] + "B")
    assert config.memory_limit_bytes + parse_bytes(shared["sizeLimit"] + "B") < memory


def test_probes_when_read_then_are_a_command_that_has_the_time_to_answer(shards: dict[str, dict[str, Any]]) -> None:
    (container,) = pod_of(shards["StatefulSet"])["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["exec"]["command"] == ["tdserve", "health"]
        assert container[name]["timeoutSeconds"] >= CHECK_TIMEOUT_S + PYTHON_START_S
    assert "health" in cli.commands


def test_pods_when_compared_with_the_compose_file_then_may_do_as_little(
    shards: dict[str, dict[str, Any]], job: dict[str, Any], checkpoint_job: dict[str, Any]
) -> None:
    (compose,) = load(DEPLOY.parent / "docker-compose.yml")
    strictness = compose["x-every-container"]
    user = re.findall(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    for pod in (pod_of(shards["StatefulSet"]), pod_of(job), pod_of(checkpoint_job)):
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": strictness["read_only"],
            "capabilities": {"drop": strictness["cap_drop"]},
            "allowPrivilegeEscalation": "no-new-privileges:true" not in strictness["security_opt"],
        }
        assert pod["securityContext"]["runAsNonRoot"]
        assert user == [tuple(str(pod["securityContext"][f"runAs{whom}"]) for whom in ("User", "Group"))]
        assert strictness["tmpfs"] == [mounts_of(pod)["tmp"]]
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert container["image"] == "tdserve"


def test_selectors_when_read_then_match_the_pods(shards: dict[str, dict[str, Any]], job: dict[str, Any]) -> None:
    labels = shards["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    selectors = [shards[kind]["spec"]["selector"]["matchLabels"] for kind in ("StatefulSet", "PodDisruptionBudget")]
    selectors += [shards["Service"]["spec"]["selector"], shards["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    (spread,) = pod_of(shards["StatefulSet"])["topologySpreadConstraints"]
    assert [*selectors, spread["labelSelector"]["matchLabels"]] == [labels] * 5
    policy = shards["NetworkPolicy"]["spec"]
    (source,), (target,) = policy["ingress"][0]["from"], policy["egress"][0]["to"]
    clients = job["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"] == target["podSelector"]["matchLabels"] == clients


def test_client_when_its_address_is_read_then_names_every_pod(
    shards: dict[str, dict[str, Any]], job: dict[str, Any]
) -> None:
    given = {each["name"] for each in pod_of(job)["containers"][0]["env"]}
    assert given <= {f"TDSERVE_{each.name.upper()}" for each in fields(ClientConfig)}
    servers, service = shards["StatefulSet"], shards["Service"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    found = read_membership(ClientConfig.from_env(variables_of(pod_of(job))).address)
    domain = f"{service['metadata']['name']}.default.svc:{DEFAULT_PORT}"
    pods = [f"{servers['metadata']['name']}-{number}.{domain}" for number in range(servers["spec"]["replicas"])]
    assert [found.find(server) for server in range(found.num_servers)] == pods


def test_checkpoint_job_when_its_arguments_are_run_then_writes_to_its_claim_as_the_client_it_is(
    job: dict[str, Any], checkpoint_job: dict[str, Any], server: tdserve.Server, tmp_path: Path
) -> None:
    pod = pod_of(checkpoint_job)
    assert variables_of(pod) == variables_of(pod_of(job))
    assert checkpoint_job["spec"]["template"]["metadata"] == job["spec"]["template"]["metadata"]
    place = mounts_of(pod)["checkpoints"]
    arguments = [str(tmp_path) if each == place else each for each in pod["containers"][0]["args"]]
    assert str(tmp_path) in arguments
    assert cli.main([*arguments, "--address", server.address], standalone_mode=False) in (0, None)
    assert len(tdserve.list_checkpoints(tmp_path)) == 1


def test_program_of_the_client_when_run_then_prints_the_stores(
    job: dict[str, Any], server: tdserve.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, option, program = pod_of(job)["containers"][0]["command"]
    assert (python, option) == ("python3", "-c")
    monkeypatch.setenv("TDSERVE_ADDRESS", server.address)
    exec(program, {})
    assert capsys.readouterr().out.startswith("[")
