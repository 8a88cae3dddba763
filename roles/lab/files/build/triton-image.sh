#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Put tritonserver and the lab's own vLLM backend and frontend on top of the engine image and name the result.
# usage: triton-image.sh IMAGE ENGINE_IMAGE WHEELHOUSE FILES_FOLDER SUITE SOURCES_LIST APT_CONF PYTHON_VERSION LABEL
# The server is the one in the wheel nvidia-pytriton: it runs without a GPU, in the layout of vendors' images (/opt/tritonserver).
set -euo pipefail

image=$1 engine=$2 wheelhouse=$3 files=$4 suite=$5 sources=$6 apt_conf=$7 python=$8 label=$9

work=$(mktemp -d --tmpdir metalserve-lab-triton.XXXXXXXX)
container=$label-build-$(basename "${image/:/-}")
trap 'rm -rf "$work"; docker rm -f "$container" >/dev/null 2>&1 || true' EXIT
docker rm -f "$container" >/dev/null 2>&1 || true

# The backend's stub links to the distribution's libpython, which the interpreter itself does not need.
mmdebstrap --mode=root --variant=extract --include="libpython$python" --aptopt="$apt_conf" "$suite" "$work/root" "$sources"

cp -r "$files" "$work/files"
mkdir "$work/lib"
find "$work/root" -name "libpython$python.so*" -exec cp -P {} "$work/lib" \;

docker run --name "$container" --label "metalserve.lab=$label" --network none --entrypoint /bin/sh \
  --volume "$wheelhouse:/mnt:ro" --volume "$work:/media:ro" "$engine" -ec '
    version=$1
    pip() { /opt/engine/bin/python "$(echo /mnt/pip-*.whl)/pip" install --disable-pip-version-check --no-input --no-cache-dir \
      --no-index --find-links /mnt --no-deps "$@"; }
    pip --no-compile --target /tmp/wheel --requirement /media/files/server.txt
    # The stub of this server crashes on numpy 2.
    pip --upgrade --requirement /media/files/numpy.txt
    server=/tmp/wheel/pytriton/tritonserver
    mkdir -p /opt/tritonserver/backends/python /opt/tritonserver/backends/vllm /opt/tritonserver/python/openai
    cp -r "$server/bin" /opt/tritonserver/bin
    cp "$server"/backends/python/* "$server/python_backend_stubs/$version"/* /opt/tritonserver/backends/python/
    cp -r /tmp/wheel/nvidia_pytriton.libs /opt/tritonserver/lib
    cp -P /media/lib/* /opt/tritonserver/lib/
    chmod 0755 /opt/tritonserver/bin/tritonserver /opt/tritonserver/backends/python/triton_python_backend_stub
    cp /media/files/backend/model.py /opt/tritonserver/backends/vllm/
    cp -r /media/files/frontend /opt/tritonserver/python/openai/openai_frontend
    rm -rf /tmp/wheel
  ' sh "$python"
docker commit --change 'ENTRYPOINT []' --change 'CMD ["/opt/tritonserver/bin/tritonserver", "--help"]' \
  --change 'ENV LD_LIBRARY_PATH=/opt/tritonserver/lib' --change "LABEL metalserve.lab=$label" "$container" "$image"
