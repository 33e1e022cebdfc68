"""The rules and the dashboard in a real Prometheus, as ``make test-monitoring`` runs them.

Promtool checks and tests the rules. Then Prometheus scrapes a job that saves in both tiers and has
restored; each query of the dashboard and of the rules must be answered, and those about what a
healthy job does must give a series. Exit status 77 where prometheus or promtool is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import yaml
from launch_support import free_port
from world import World, save_all

ROOT = Path(__file__).parents[2]
MISSING = 77
WAIT_S = 120
MONITORING = ROOT / "deploy" / "monitoring"
# A healthy job has none of these.
TROUBLE = re.compile(
    r"eckpt_(failed|skipped|passed_over|quarantined|divergence|unreachable|preemptions)\w*|node_"
)


def ask(address: str, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus; an error of the query raises HTTPError."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)["data"]


def queries() -> list[str]:
    """Return the queries of dashboard and rules, with the variables that Grafana would put in."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found = [each.replace("$run", ".*").replace("$__rate_interval", "30s") for each in found]
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return found + [rule["expr"] for group in groups for rule in group["rules"]]


def config_of(root: Path, target_port: int) -> Path:
    """Write Prometheus's configuration: the rules, and one process to scrape each second."""
    path = root / "prometheus.yml"
    document = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "rules.yaml")],
        "scrape_configs": [
            {"job_name": "eckpt", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        ],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def unanswered(address: str) -> list[str]:
    """Return the queries about a healthy job that give no series; each must be valid."""
    found: list[str] = []
    for query in queries():
        answer = ask(address, "query", query=query)["result"]
        if not answer and not TROUBLE.search(query) and not re.search(r" [<>] ", query):
            found.append(query)
    return found


def watch(root: Path, address: str, port: int) -> None:
    """Run a job until Prometheus has an answer to each query. Its second life restores."""
    world = World(root)
    with world.open_both(on_event=f"prometheus({port})") as checkpointer:
        save_all(checkpointer, world, 1, 2)
    with world.open_both(on_event=f"prometheus({port})") as checkpointer:
        step, _ = checkpointer.restore(state=world.state(0), host_state={})
        assert step == 2, step
        checkpointer.wait_until_finished()
        deadline_s = time.monotonic() + WAIT_S
        missing = ["not asked yet"]
        while missing and time.monotonic() < deadline_s:
            for _ in range(4):
                step += 1
                save_all(checkpointer, world, step)
                time.sleep(0.25)  # saves go on while Prometheus scrapes
            missing = unanswered(address)
        assert not missing, missing
        groups = ask(address, "rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        faults = [rule for rule in rules if rule.get("lastError")]
        assert rules
        assert not faults, faults
        firing = {alert["labels"]["alertname"] for alert in ask(address, "alerts")["alerts"]}
        assert firing <= {"EckptFewCopies"}, firing
        values = ask(address, "query", query='max(eckpt_newest_step{tier="local"})')["result"]
        newest = values[0]["value"][1]
        print(f"{len(queries())} queries answered at step {step}; the newest there is {newest}")


def main() -> int:
    """Check all; return 77 where Prometheus is not installed."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not found; apt-get install prometheus")
        return MISSING
    subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=MONITORING, check=True)
    subprocess.run(["promtool", "test", "rules", "rules_test.yaml"], cwd=MONITORING, check=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        port, address = free_port(), f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={config_of(root, port)}"]
        command += [f"--storage.tsdb.path={root / 'data'}", f"--web.listen-address={address}"]
        with (root / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_ready(address, server, root / "log")
            watch(root, address, port)
        finally:
            server.terminate()
            server.wait(30)
    return 0


def wait_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until Prometheus answers."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(log.read_text())


if __name__ == "__main__":
    sys.exit(main())
