"""deploy/kubernetes: every document is what its schema asks for, and says of shmserve what shmserve does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shmserve.cli import cli
from shmserve.config import HttpConfig
from shmserve.http.security import OPEN, Gate
from shmserve.http.stock_metrics import CACHE_CONFIG, GAUGES

yaml = pytest.importorskip("yaml", reason="pip install '.[dev]'")

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
POOL_SCHEMA = Path(__file__).with_name("inference_pool.schema.json")


def documents(name):
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


@pytest.fixture(scope="module")
def deployment():
    return documents("shmserve.yaml")["Deployment"]


@pytest.fixture(scope="module")
def container(deployment):
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Deployment", "Service", "PodDisruptionBudget"])
def test_every_document_is_what_kubernetes_itself_asks_for(kind):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install '.[kubernetes]'")
    validator.validate(documents("shmserve.yaml")[kind], "1.33", strict=True)


@pytest.mark.slow
def test_the_validator_would_notice_a_wrong_field(deployment):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install '.[kubernetes]'")
    wrong = json.loads(json.dumps(deployment))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbes"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, "1.33", strict=True)


@pytest.mark.slow
def test_the_pool_is_what_the_inference_extension_asks_for():
    jsonschema = pytest.importorskip("jsonschema", reason="pip install '.[kubernetes]'")
    pool = documents("inference-pool.yaml")["InferencePool"]
    schema = json.loads(POOL_SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(pool, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(pool | {"spec": {**pool["spec"], "targetPortNumber": 8000}}, schema)


def test_pool_service_and_route_lead_to_the_pods(deployment, container):
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    service = documents("shmserve.yaml")["Service"]["spec"]
    pool = documents("inference-pool.yaml")["InferencePool"]
    assert service["selector"] == pool["spec"]["selector"]["matchLabels"] == labels
    assert {each["targetPort"] for each in service["ports"]} == {"http"}
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [ports["http"]]
    route = documents("inference-pool.yaml")["HTTPRoute"]["spec"]["rules"][0]
    assert [each["name"] for each in route["backendRefs"]] == [pool["metadata"]["name"]]
    assert f"--port={ports['http']}" in container["args"]


def test_liveness_is_not_readiness_and_no_probe_needs_a_key(container):
    probes = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert probes == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    assert set(probes.values()) <= OPEN


def test_a_drain_is_over_before_the_kubelet_loses_patience(deployment, container):
    (flag,) = (each for each in container["args"] if each.startswith("--drain-timeout="))
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert grace >= int(seconds) + int(flag.partition("=")[2]) + 10


def test_the_service_may_be_called_by_each_of_its_names(container):
    (flag,) = (each for each in container["args"] if each.startswith("--allowed-hosts="))
    service = documents("shmserve.yaml")["Service"]["metadata"]["name"]
    gate = Gate(HttpConfig(allowed_hosts=(flag.partition("=")[2],)), ["0.0.0.0"])
    for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local"):
        assert gate._is_good(f"{service}{suffix}:8000")
    assert gate._is_good("10.1.2.3:8000") and not gate._is_good("elsewhere.example")


def test_the_command_is_one_that_shmserve_takes(container):
    assert container["command"] == ["shmserve"]
    told = CliRunner().invoke(cli, [*container["args"], "--print-limits"])
    assert told.exit_code == 0, told.output


def test_the_metrics_that_the_pool_names_are_served():
    served = {stock.name for stock, _ in GAUGES} | {CACHE_CONFIG.name}
    text = (FOLDER / "inference-pool.yaml").read_text()
    named = {word for line in text.splitlines() if line[:1] == "#" for word in line.split()}
    wanted = {word for word in named if word.startswith("vllm:")}
    assert len(wanted) == 4 and wanted <= served
