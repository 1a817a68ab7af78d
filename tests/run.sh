#!/usr/bin/env bash
# Set up what the tests need, in a virtual environment of the checkout, and run every check.
#
#   bash tests/run.sh                     say which system packages are missing, or run everything
#   bash tests/run.sh --install-system    install them first (apt-get, with sudo unless you are root)
#   bash tests/run.sh tests/spec          other arguments go to pytest
set -eu
cd "$(dirname "$0")/.."

install_system=no
if [ "${1:-}" = --install-system ]; then
    install_system=yes
    shift
fi

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v nginx >/dev/null || missing+=(nginx-light)
command -v curl >/dev/null || missing+=(curl)
command -v promtool >/dev/null || missing+=(prometheus)
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing+=(postgresql)
if [ ${#missing[@]} -gt 0 ]; then
    if [ $install_system = no ]; then
        echo "The tests need these system packages: ${missing[*]}" >&2
        echo "Install them, or let this script do it: bash tests/run.sh --install-system" >&2
        exit 1
    fi
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${missing[@]}" >/dev/null
fi

# Dozens of servers and sandboxes start as processes of their own: each would compile every import again.
unset PYTHONDONTWRITEBYTECODE

python=.venv/bin/python
# Python of Linux distributions is built with profiles, those of version managers mostly are not: the tests take a sixth longer.
usable='import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
[ -n "${PYTHON:-}" ] || { /usr/bin/python3 -c "$usable" 2>/dev/null && PYTHON=/usr/bin/python3; } || PYTHON=python3
[ -x $python ] || "$PYTHON" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
# uv unpacks on every core the 3 GB that pip unpacks on one. It does not read pip's settings, so they are passed on; where
# it cannot do with them, pip does the work.
pip_setting() { $python -m pip config list | sed -n "s/^[^=]*[.]$1='\(.*\)'\$/\1/p" | tail -n 1 | tr ' ' ','; }
install_packages() {
    $python -m pip install --quiet --no-compile uv || return
    UV_FIND_LINKS=$(pip_setting find-links) UV_DEFAULT_INDEX=$(pip_setting index-url) UV_SYSTEM_CERTS=1 \
        $python -m uv pip install --quiet --python $python --editable '.[all,test]'
}
install_packages || $python -m pip install --quiet --no-compile --editable '.[all,test]'

$python -m ruff check .
$python -m ruff format --check .

# Types are checked while the tests run: the tests wait for much of their time, so three processes fill two cores.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
$python -m pyright --pythonpath $python >"$types" 2>&1 &
pyright=$!

# One thread for each process: small matrices only lose time on more.
export OMP_NUM_THREADS=1
failed=0
$python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait $pyright || { cat "$types"; failed=1; }
tail -n 1 "$types"
exit $failed
