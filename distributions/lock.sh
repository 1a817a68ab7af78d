#!/usr/bin/env bash
# Writes the requirements.txt of each image, and build-requirements.txt of all: versions, and hashes of the files of every platform.
# Versions that pyproject.toml still allows stay, unless the arguments say otherwise: `--upgrade`, `--upgrade-package NAME`.
set -eu
cd "$(dirname "$0")"

compile() {
    python -m uv pip compile --quiet --universal --python-version 3.13 --generate-hashes --only-binary :all: --no-annotate \
        --custom-compile-command "bash distributions/lock.sh" "$@"
}

lock() {
    local folder=$1 extras=() extra
    for extra in $2; do extras+=(--extra "$extra"); done
    compile ../pyproject.toml "${extras[@]}" --output-file "$folder/requirements.txt" "${@:3}"
}

lock gpt-oss "gpt-oss otel" "$@"
lock local "local otel" "$@"
lock vllm "harmony objects otel postgres redis" "$@"
echo hatchling | compile - --output-file build-requirements.txt "$@"
