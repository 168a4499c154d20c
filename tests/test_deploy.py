"""`docker-compose.yml`, what it mounts, the pod of docs/operations.md and the alerts: they follow
their specifications, and name files, options and metrics that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support import load_tools
from support.promql import check, selectors_of
from typer.main import get_command
from write_operations_docs import RULES, rules

from inflight_openai.command import openai
from inflight_protocol import HISTOGRAMS, METRICS
from inflight_server.commands.serve import serve
from inflight_server.commands.worker import worker

ROOT = Path(__file__).resolve().parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
REPLICAS_FILE = ROOT / "deploy/replicas/docker-compose.yml"
KUBERNETES = ROOT / "deploy/kubernetes"
DASHBOARD_FILE = ROOT / "deploy/grafana/dashboards/inflight.json"
DATASOURCE_FILE = ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml"
PROVIDER_FILE = ROOT / "deploy/grafana/provisioning/dashboards/inflight.yml"

# Triton's own families: docs/user_guide/metrics.md of its server repository.
TRITON_FAMILIES = {
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_utilization",
    "nv_inference_pending_request_count",
    "nv_inference_request_failure",
    "nv_inference_request_success",
}


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    services: dict[str, Any] = read_yaml(COMPOSE_FILE)["services"]
    return services


def settings_of(command: Callable[..., None], arguments: list[str]) -> dict[str, Any]:
    """What a command line sets; it must be one that the command takes."""
    own = typer.Typer()
    own.command()(command)
    return get_command(own).make_context("inflight", arguments).params


def test_the_files_follow_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    files = [str(COMPOSE_FILE), str(REPLICAS_FILE)]
    result = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_images_are_pinned_and_ports_are_published_on_loop_back_only(
    services: dict[str, Any],
) -> None:
    dockerfiles = [ROOT / "deploy/Dockerfile", REPLICAS_FILE.with_name("Dockerfile")]
    texts = [path.read_text() for path in dockerfiles]
    images = [image for text in texts for image in re.findall(r"(?m)^FROM (\S+)$", text)]
    assert len(images) == 2
    for name, service in (*services.items(), *read_yaml(REPLICAS_FILE)["services"].items()):
        images.append(service["image"])
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to the network"
    for image in images:
        assert re.search(r":v?\d+\.\d+[^:]*$", image), f"{image} has no version"


def test_the_front_listens_where_it_is_published_and_asks_the_server(
    services: dict[str, Any],
) -> None:
    service = services["openai"]
    program, name, *arguments = service["command"]
    assert (program, name) == ("inflight", "openai")
    settings = settings_of(openai, arguments)
    assert service["ports"] == [f"127.0.0.1:{settings['port']}:{settings['port']}"]
    assert settings["url"] == "triton:8001"
    assert settings["host"] == "0.0.0.0"  # inside the container; `ports` decides who reaches it
    assert service["image"] == services["triton"]["image"]


def test_every_file_that_is_mounted_or_copied_exists(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / services["triton"]["build"]["dockerfile"]).read_text()
    lines = re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    assert {"backend", "client", "kernels", "scheduler", "model_repository"} <= copied
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    mounted = {mount.split(":")[0] for mount in mounts if not mount.startswith("${MODEL_DIR:?")}
    volumes = {source for source in mounted if not source.startswith("./")}
    assert volumes == set(read_yaml(COMPOSE_FILE)["volumes"])
    missing = [each for each in copied | mounted - volumes if not (ROOT / each).exists()]
    assert missing == []


def test_the_server_has_a_gpu_a_read_only_model_and_time_to_drain(services: dict[str, Any]) -> None:
    triton = services["triton"]
    [device] = triton["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    [model] = [mount for mount in triton["volumes"] if "MODEL_DIR" in mount]
    assert model.endswith(":/model:ro")
    assert triton["command"][-2:] == ["--model", "/model"]
    assert int(triton["stop_grace_period"].removesuffix("s")) > 30


@pytest.mark.parametrize("has_compiler", [True, False])
def test_an_image_without_a_compiler_is_not_built(tmp_path: Path, has_compiler: bool) -> None:
    """Triton needs one, and Python.h, at the first load: the line that looks for both, as it is."""
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", "")
    [line] = re.findall(r"^RUN (printf .*launcher\.c)$", text, re.MULTILINE)
    compiler = shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    (tmp_path / "rm").symlink_to(shutil.which("rm") or "rm")
    (tmp_path / "python3").symlink_to(sys.executable)
    if has_compiler:
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            pytest.skip("this Python has no headers")
        (tmp_path / "gcc").symlink_to(compiler)
    done = subprocess.run(
        ["/bin/sh", "-c", line.replace("/tmp/", f"{tmp_path}/")],
        env={"PATH": str(tmp_path)},
        check=False,
        capture_output=True,
    )
    assert (done.returncode == 0) == has_compiler, done.stderr


def test_the_pod_of_the_operations_page_is_what_compose_runs(services: dict[str, Any]) -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    triton = services["triton"]
    assert container["image"] == triton["image"]
    assert "command" not in container, "it would take the place of the image's entry point"
    program, name, *arguments = container["args"]
    assert (program, name) == ("inflight", "serve")
    settings = settings_of(serve, arguments)
    assert (settings["host"], str(settings["model"])) == ("0.0.0.0", "/model")
    ports = [settings[f"{kind}_port"] for kind in ("http", "grpc", "metrics")]
    assert [port["containerPort"] for port in container["ports"]] == ports
    [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = int(pause) + settings["drain_seconds"] + 15
    assert pod["terminationGracePeriodSeconds"] == needed
    assert container["readinessProbe"]["httpGet"]["path"] in triton["healthcheck"]["test"][-1]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert {mounts["model"], mounts["kernels"]} == {
        mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in triton["volumes"]
    }
    assert "livenessProbe" not in container


def objects(name: str) -> dict[str, Any]:
    """The objects of a manifest by kind."""
    text = (KUBERNETES / name).read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_replicas_are_the_server_of_the_other_file(services: dict[str, Any]) -> None:
    """Three of them, each with a GPU of its own, and the router knows them all."""
    replicas = read_yaml(REPLICAS_FILE)["services"]
    router, triton = replicas.pop("router"), services["triton"]
    devices = []
    for service in replicas.values():
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
        for key in ("image", "stop_grace_period", "volumes", "shm_size"):
            assert service[key] == triton[key], key
        here, there = (settings_of(serve, each["command"][2:]) for each in (service, triton))
        assert here == there | {"openai_port": 9000}  # which is another service there
        assert f":{settings_of(serve, service['command'][2:])['openai_port']}/health" in str(
            service["healthcheck"]
        )
        assert (REPLICAS_FILE.parent / service["build"]["context"]).resolve() == ROOT
    assert devices == ["0", "1", "2"]
    urls = [argument for argument in router["command"] if argument.startswith("http://")]
    assert urls == [f"http://{name}:9000" for name in replicas]
    assert set(router["depends_on"]) == set(replicas)


def test_the_pods_are_that_of_the_operations_page_and_gateways_find_them() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    expected = yaml.safe_load(text)["spec"]["template"]["spec"]
    template = objects("servers.yml")["Deployment"]["spec"]["template"]
    [container], [other] = template["spec"].pop("containers"), expected.pop("containers")
    assert template["spec"] == expected
    health = {"path": "/health", "port": 9000}
    for probe in ("startupProbe", "readinessProbe"):
        assert container.pop(probe)["httpGet"] == health
        del other[probe]
    for each in (container, other):
        del each["name"], each["ports"]
    assert container == other
    router, gateway = objects("router.yml"), objects("gateway.yml")
    labels = template["metadata"]["labels"]
    [pod] = router["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert pod["image"] == read_yaml(REPLICAS_FILE)["services"]["router"]["image"]
    assert f"app={labels['app']}" in pod["args"]
    pool = gateway["InferencePool"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 9000}]
    [rule] = gateway["HTTPRoute"]["spec"]["rules"]
    assert [each["name"] for each in rule["backendRefs"]] == [pool["metadata"]["name"]]
    account = router["ServiceAccount"]["metadata"]["name"]
    assert router["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert [each["name"] for each in router["RoleBinding"]["subjects"]] == [account]


@pytest.mark.slow
def test_the_router_takes_its_options() -> None:
    """Of the version whose image it is."""
    [version] = re.findall(r"==([0-9.]+)", REPLICAS_FILE.with_name("Dockerfile").read_text())
    assert (load_tools.ROOT / f"sglang_router-{version}.dist-info").is_dir()
    program = """
import argparse, sys
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
arguments = RouterArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
print(arguments.port, arguments.policy, len(arguments.worker_urls), arguments.selector)
"""
    [pod] = objects("router.yml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    command = read_yaml(REPLICAS_FILE)["services"]["router"]["command"]
    for arguments, expected in (
        (command, "9000 cache_aware 3 {}\n"),
        (pod["args"], "9000 cache_aware 0 {'app': 'inflight'}\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=os.environ | {"PYTHONPATH": str(load_tools.ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == expected, done.stderr


def test_grafana_is_provisioned_from_the_mounted_folders(services: dict[str, Any]) -> None:
    [provider] = read_yaml(PROVIDER_FILE)["providers"]
    folder = provider["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{DASHBOARD_FILE.name}"


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD_FILE.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    for expression in dashboard_expressions():
        assert selectors_of(expression)
        check(expression, TRITON_FAMILIES)


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD_FILE.read_text(encoding="utf-8"))
    [datasource] = read_yaml(DATASOURCE_FILE)["datasources"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {datasource["uid"]}
    shown = {
        family
        for expr in dashboard_expressions()
        for family, _ in selectors_of(expr)
        if family not in TRITON_FAMILIES
    }
    constant = {"nv_trt_llm_disaggregated_serving_metrics"}
    wanted = {family.name for family in METRICS} | {f"{each.name}_bucket" for each in HISTOGRAMS}
    assert shown >= wanted - constant, "a family of ours has no panel"
    assert "Estimate" not in DASHBOARD_FILE.read_text(encoding="utf-8")


def test_every_alert_can_fire_and_is_one_that_prometheus_reads(services: dict[str, Any]) -> None:
    """It names metrics that exist, and its sides have the same labels. Prometheus refuses the whole
    file for a field that it does not know."""
    config = read_yaml(ROOT / "deploy/prometheus.yml")
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    for rule in rules():
        check(rule["expr"], set())
        assert set(re.findall(r'job="([^"]*)"', rule["expr"])) <= jobs
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1s"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        templates = re.findall(r"\{\{(.*?)\}\}", str(rule["annotations"]))
        assert templates == [" $labels.instance "]
    mounts = services["prometheus"]["volumes"]
    [mounted] = [mount for mount in mounts if "/prometheus.yml:" in mount]
    folder = mounted.split(":")[1].rpartition("/")[0]
    assert config["rule_files"] == [RULES.name]  # beside the file that says so
    assert f"./{RULES.relative_to(ROOT)}:{folder}/{RULES.name}:ro" in mounts


def test_the_group_of_machines_is_the_server_of_the_other_file() -> None:
    """Both of its commands parse and ask for as many GPUs as the machines have."""
    server = objects("servers.yml")["Deployment"]["spec"]["template"]["spec"]
    spec = objects("leader_worker_set.yml")["LeaderWorkerSet"]["spec"]
    group = spec["leaderWorkerTemplate"]
    pods = [group[part]["spec"] for part in ("leaderTemplate", "workerTemplate")]
    assert spec["startupPolicy"] == "LeaderCreated"
    commands: list[Callable[..., None]] = [serve, worker]
    for pod, command in zip(pods, commands, strict=True):
        [container] = pod["containers"]
        name, _, *arguments = container["args"]
        assert name == "inflight"
        app = typer.Typer()
        app.command()(command)
        found = get_command(app).make_context(command.__name__, arguments).params
        num_ranks = found["tensor_parallel_size"] * found["pipeline_parallel_size"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] * group["size"] == num_ranks
        assert {each["name"] for each in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
    [leader], [alone] = pods[0]["containers"], server["containers"]
    for key in ("startupProbe", "readinessProbe", "lifecycle", "image"):
        assert leader[key] == alone[key], key
    assert pods[0]["terminationGracePeriodSeconds"] == server["terminationGracePeriodSeconds"]


def test_a_slurm_job_starts_a_server_and_the_ranks_of_the_others(tmp_path: Path) -> None:
    """With Slurm's commands played: each machine gets its place, and takes no task for a rank."""
    commands = {
        "scontrol": 'echo "$3-first"; echo "$3-second"',
        "srun": 'for node in 0 1; do SLURM_NODEID=$node SLURM_LOCALID=0 "${@:2}"; done',
        "inflight": 'echo "${SLURM_LOCALID-none} $*"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "deploy/slurm/serve.sbatch", "/model"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "rack",
             "SLURM_NNODES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for node, line in enumerate(lines):
        local, name, *arguments = line.split()
        assert (local, name) == ("none", "serve")
        found = settings_of(serve, arguments)
        assert (found["nnodes"], found["node_rank"]) == (2, node)
        assert (found["master_addr"], str(found["model"])) == ("rack-first", "/model")
