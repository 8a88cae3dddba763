#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Install wheels into /opt/engine of a base image and name the result. No network is used.
# usage: venv-image.sh IMAGE BASE_IMAGE WHEELHOUSE REQUIREMENTS_FOLDER ENTRYPOINT_JSON LABEL
set -euo pipefail

image=$1 base=$2 wheelhouse=$3 requirements=$4 entrypoint=$5 label=$6

container=$label-build-$(basename "${image/:/-}")
trap 'docker rm -f "$container" >/dev/null 2>&1 || true' EXIT
docker rm -f "$container" >/dev/null 2>&1 || true

docker run --name "$container" --label "metalserve.lab=$label" --network none \
  --volume "$wheelhouse:/mnt:ro" --volume "$requirements:/media:ro" "$base" \
  /bin/sh -ec '
    python3 -m venv --without-pip /opt/engine
    /opt/engine/bin/python "$(echo /mnt/pip-*.whl)/pip" install --disable-pip-version-check --no-input --no-cache-dir \
      --no-index --find-links /mnt --no-deps --requirement /media/requirements.txt
    # Headers and tests of libraries: nothing is compiled in this image.
    cd /opt/engine/lib/python3*/site-packages
    rm -rf torch/include torch/test
    find numpy sympy numba networkx llvmlite -type d -name tests -prune -exec rm -rf {} +
  '
docker commit --change "ENTRYPOINT $entrypoint" --change 'CMD []' --change "ENV PATH=/opt/engine/bin:/usr/bin:/bin" \
  --change "LABEL metalserve.lab=$label" "$container" "$image"
