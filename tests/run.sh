#!/usr/bin/env bash
# Sets up all that the tests need, in a virtual environment of the checkout, and runs every check.
# Arguments go to pytest: bash tests/run.sh tests/spec
set -eu
cd "$(dirname "$0")/.."

needed=()
command -v redis-server >/dev/null || needed+=(redis-server)
command -v bwrap >/dev/null || needed+=(bubblewrap)
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || needed+=(postgresql)
if [ ${#needed[@]} -gt 0 ]; then
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${needed[@]}" >/dev/null
fi

python=.venv/bin/python
[ -x $python ] || "${PYTHON:-python3}" -m venv .venv
$python -m pip install --quiet --disable-pip-version-check --editable '.[all,test]'

export OMP_NUM_THREADS=2
$python -m ruff check .
$python -m ruff format --check .
$python -m pyright --pythonpath $python
exec $python -m pytest "$@"
