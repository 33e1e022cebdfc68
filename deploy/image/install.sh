#!/bin/sh
# install.sh WHEELS LOCK: install the packages of LOCK (lock.sh), each with the hash that it has there, and the one wheel in WHEELS.
# No compiler is needed, and none is used: a package without a wheel is an error.
set -eu
wheels=$1 lock=$2
if ! test -f "$lock"; then
    echo "install.sh: there is no $lock: deploy/image/lock.sh writes it, with the hashes of all packages" >&2
    exit 1
fi
pip() {
    "${PYTHON:-python3}" -m pip "$@"
}
install="install --quiet --disable-pip-version-check --no-cache-dir --root-user-action ignore"
pip $install --only-binary :all: --require-hashes --requirement "$lock"
pip $install --no-deps --no-index "$wheels"/emergency_ckpt-*.whl
pip check
