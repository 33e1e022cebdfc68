#!/bin/sh
# lock.sh SOURCE OUT [PACKAGE ...]: name in OUT each package of the image, with its version and the hashes of its wheels.
# The packages are what SOURCE needs, and what the trainer needs besides. Run it where the index is the one of the build, read
# the file, and keep it beside the Dockerfile: an image is built of these files and no others.
set -eu
source=$1 out=$2
shift 2
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet --disable-pip-version-check uv
printf '%s\n' "$@" > "$tools/besides.in"
"$tools/venv/bin/uv" pip compile --quiet --no-header --generate-hashes --only-binary :all: \
    --python-version "${PYTHON_VERSION:-3.12}" --python-platform "${PLATFORM:-x86_64-manylinux_2_28}" \
    --extra gcs --output-file "$out" "$source/pyproject.toml" "$tools/besides.in"
