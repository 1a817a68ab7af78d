"""Packages from the real registries of Python and npm, installed by commands in a container."""

import json
import shutil

import pytest

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import create
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HOSTS = ["pypi.org", "files.pythonhosted.org", "registry.npmjs.org"]
COMMAND = (
    "cd /tmp && python3 -m pip install tomli-w && npm install left-pad && "
    "python3 -c 'import tomli_w; print(tomli_w.dumps(dict(a=1)))' && node -p 'require(\"left-pad\")(7, 3, 0)'"
)


@pytest.mark.skipif(not all(map(shutil.which, ("bwrap", "npm"))), reason="bubblewrap or npm is not installed")
async def test_packages_are_installed_from_their_registries() -> None:
    """Private addresses are allowed, since a machine of tests may have registries of its own under these names."""
    egress = {"allowed_hosts": HOSTS, "allowed_private_networks": ["0.0.0.0/0", "::/0"]}
    limits = {"timeout_s": 120, "cpu_s": 60, "memory_mib": 1024, "scratch_mib": 256}
    policy = {"type": "allowlist", "allowed_domains": HOSTS}
    tool = {"type": "shell", "environment": {"type": "container_auto", "network_policy": policy}}
    python = {"provider": "python", "egress": egress, **limits, **SHARED_PYTHON}
    async with serving(MODEL, tool_runtime=python) as served:
        turn = [call("shell", json.dumps({"commands": [COMMAND]}), id="c1")]
        response = await create(served, input=play(turn), tools=[tool], timeout=200)
    (output,) = response.output[1].output
    assert output.outcome.exit_code == 0, output
    assert output.stdout.endswith("a = 1\n\n007\n")
