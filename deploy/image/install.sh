#!/bin/sh
# install.sh WHEELS [PACKAGE ...]: install the one wheel in WHEELS, and what the trainer needs besides.
# No compiler is needed, and none is used: a package without a wheel is an error.
set -eu
wheels=$1
shift
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    --root-user-action ignore --only-binary :all: "$wheels"/emergency_ckpt-*.whl "$@"
