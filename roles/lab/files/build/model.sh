#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Convert the lab's model once, in the engine image, without a network.
# usage: model.sh FOLDER ENGINE_IMAGE WHEELHOUSE RECIPE_FOLDER KEY LABEL OWNER
# FOLDER appears when it is whole; FOLDER.key then names the recipe that made it.
set -euo pipefail

folder=$1 image=$2 wheelhouse=$3 recipe=$4 key=$5 label=$6 owner=$7

container=$label-build-model
trap 'docker rm -f "$container" >/dev/null 2>&1 || true' EXIT
docker rm -f "$container" >/dev/null 2>&1 || true

rm -rf "$folder.partial"
mkdir -p "$folder.partial"
docker run --name "$container" --label "metalserve.lab=$label" --network none --entrypoint /bin/sh \
  --env HF_HUB_OFFLINE=1 --env HF_HUB_DISABLE_TELEMETRY=1 \
  --volume "$wheelhouse:/mnt:ro" --volume "$recipe:/media:ro" --volume "$folder.partial:/srv" "$image" -ec '
    /opt/engine/bin/python "$(echo /mnt/pip-*.whl)/pip" install --disable-pip-version-check --no-input --no-cache-dir \
      --no-index --find-links /mnt --no-deps --target /tmp/extra -r /media/requirements.txt
    gguf=$(find /tmp/extra -name "*.gguf")
    PYTHONPATH=/tmp/extra /opt/engine/bin/python /media/convert.py "$gguf" /srv
  '
chmod -R a+rX "$folder.partial"
chown -R "$owner" "$folder.partial"
rm -rf "$folder" "$folder.key"
mv "$folder.partial" "$folder"
echo "$key" >"$folder.key"
