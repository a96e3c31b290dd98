"""The deployment examples agree with the Dockerfile and with each other, and are as strict as they claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "k8s").glob("*.yaml"))


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def pod(request):
    documents = list(yaml.safe_load_all(request.param.read_text()))
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    return deployment["spec"]["template"]["spec"]


def test_every_container_is_locked_down(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container.get("resources", {}).get("limits") or container in pod["initContainers"]


def test_probes_ask_what_the_service_answers(pod):
    served = set(re.findall(r'Route\("(/\w+)"', (ROOT / "examples" / "serve.py").read_text()))
    [container] = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {"/live", "/ready"} <= served


def test_volumes_are_mounted_and_bundles_named_below_them(pod):
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    [container] = pod["containers"]
    mounts = {mount["name"]: mount for mount in container.get("volumeMounts", ())}
    assert mounts.keys() == volumes
    settings = {row["name"]: row["value"] for row in container.get("env", ())}
    if volumes:
        assert mounts["bundle"]["readOnly"] is True
        assert settings["TCACHE_BUNDLES"].startswith(mounts["bundle"]["mountPath"] + "/")
        assert settings["TCACHE_MODE"] == "frozen"
        assert settings["TMPDIR"] == "/dev/shm"
        assert settings["TRITON_CACHE_MANAGER"] == "tcache.overlay:OverlayCacheManager"


def test_the_dockerfile_copies_what_exists_and_ends_frozen_as_nobody():
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    final = text[text.rindex("FROM ") :]
    assert "gcc" not in final
    assert re.search(r"^USER \d+$", final, re.MULTILINE)
    assert "TCACHE_MODE=frozen" in final
    assert "TMPDIR=/dev/shm" in final
    assert "HOME" not in final
