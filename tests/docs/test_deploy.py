"""The files of `deploy/` are complete; none is built or applied, which needs Docker and a cluster."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kindler.cli import build_parser

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = [
    pytest.param(item, id=f"{path.stem}-{item['kind']}")
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for item in yaml.safe_load_all(path.read_text())
]
IMAGES = {"kindler-serve", "kindler-worker", "kindler-spark"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines if line)
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.rpartition(" AS ")[2]] = []
        list(found.values())[-1].append((word, rest))
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The pods of Deployments and Jobs, by name."""
    items = [parameter.values[0] for parameter in MANIFESTS]
    return {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in items
        if item["kind"] in ("Deployment", "Job")
    }


def test_the_dockerfile_has_an_image_for_each_command_and_copies_what_is_there() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD", "USER", "EXPOSE"}
    known |= {"HEALTHCHECK", "STOPSIGNAL"}
    assert {word for word, _ in instructions()} <= known
    assert {"serve", "worker", "spark"} <= set(stages())
    for word, rest in stages()["wheels"]:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    for name in ("serve", "worker", "spark"):
        users = [rest for word, rest in stages()[name] if word == "USER"]
        assert users[-1] not in ("root", "0"), "it runs as a user without rights"


def test_what_docker_is_told_to_leave_out_is_not_what_the_dockerfile_copies() -> None:
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = [rest.split()[:-1] for word, rest in stages()["wheels"] if word == "COPY"]
    assert sorted(kept) == sorted(source for sources in copied for source in sources)


@pytest.mark.parametrize("stage", ["serve", "worker", "spark"])
def test_the_extras_of_an_image_are_those_of_the_project(stage: str) -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = [rest for word, rest in stages()[stage] if word == "ARG" and rest.startswith("EXTRAS=")]
    assert set(line.partition("=")[2].split(",")) <= set(extras)


@pytest.mark.parametrize("stage", ["serve", "worker"])
def test_the_command_of_an_image_is_one_of_kindler(stage: str) -> None:
    (command,) = [json.loads(rest) for word, rest in stages()[stage] if word == "CMD"]
    assert build_parser().parse_args(command).command == stage
    (entry,) = [json.loads(rest) for word, rest in stages()["base"] if word == "ENTRYPOINT"]
    assert entry == ["kindler"]


def test_the_compose_file_builds_stages_that_exist_and_runs_commands_that_exist() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    for name in ("serve", "worker"):
        service = services[name]
        folder = (DEPLOY / "docker" / service["build"]["context"]).resolve()
        assert (folder / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] in stages()
        assert build_parser().parse_args(service["command"]).command == name
        assert service["cap_drop"] == ["ALL"]
    assert set(services) >= {one for name in ("serve", "worker") for one in services[name]["depends_on"]}


@pytest.mark.parametrize("item", MANIFESTS)
def test_a_manifest_says_what_it_is(item: dict[str, Any]) -> None:
    assert item["apiVersion"]
    assert re.fullmatch(r"[a-z0-9-]+", item["metadata"]["name"])
    template = item.get("spec", {}).get("template")
    if item["kind"] == "Deployment":
        selected = item["spec"]["selector"]["matchLabels"]
        assert selected.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", ["kindler-serve", "kindler-worker"])
def test_pods_of_kindler_run_commands_that_exist_without_rights(name: str) -> None:
    pod = pods()[name]
    (container,) = pod["containers"]
    assert build_parser().parse_args(container["args"]).command == name.partition("-")[2]
    assert container["image"].rpartition("/")[2].partition(":")[0] in IMAGES
    assert pod["securityContext"]["runAsNonRoot"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_server_is_probed_where_it_listens_and_may_finish_its_requests() -> None:
    pod = pods()["kindler-serve"]
    (container,) = pod["containers"]
    chosen = build_parser().parse_args(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == chosen.port
    paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: get["path"] for kind, get in paths.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {get["port"] for get in paths.values()} == {port["name"]}
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + chosen.drain_s + 2


def test_the_training_job_runs_a_program_that_is_in_its_config() -> None:
    files = next(p.values[0]["data"] for p in MANIFESTS if p.values[0]["kind"] == "ConfigMap")
    ast.parse(files["train.py"])
    assert yaml.safe_load(files["executor.yaml"])["kind"] == "Pod"
    (container,) = pods()["kindler-train"]["containers"]
    assert Path(container["command"][-1]).name in files
    read = set(re.findall(r'os\.environ\["(\w+)"\]', files["train.py"]))
    assert read == {one["name"] for one in container["env"]}
    image = next(one["value"] for one in container["env"] if one["name"] == "IMAGE")
    assert image == container["image"], "the driver and the executors have the same Python"


def test_commands_of_these_pages_and_of_how_tos_are_those_of_kindler() -> None:
    pages = [page for folder in ("deploy", "howto") for page in (ROOT / "docs" / folder).glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"^\$ (?:\w+='[^']*' )?(kindler .+)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[1:])
