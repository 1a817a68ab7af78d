"""The tests of the page's own modules, in JavaScript: units.js, run by Node, or by Chromium where there is no Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from stack.http.routes.console.page import FOLDER
from tests.console.conftest import OpenPage
from tests.support.servers.serving import serving

UNITS = Path(__file__).with_name("units.js")
NODE = shutil.which("node")
RUN = """
async (source) => {
  const { check } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  return check((path) => import(`${location.origin}/console/${path}`));
}
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node: Chromium runs them")
def test_modules_do_what_their_units_say_in_node(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copy(UNITS, tmp_path)
    shutil.copytree(FOLDER, tmp_path / "console", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    command = [str(NODE), str(tmp_path / UNITS.name), str(tmp_path / "console")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == []


@pytest.mark.console
@pytest.mark.skipif(NODE is not None, reason="Node has run them")
async def test_modules_do_what_their_units_say_in_chromium(open_page: OpenPage) -> None:
    async with serving() as served, open_page(f"{served.url}/", bypass_csp=True) as page:
        assert await page.evaluate(RUN, UNITS.read_text()) == []
