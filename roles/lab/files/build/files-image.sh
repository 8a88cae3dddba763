#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Put a folder of files at /opt/engine of a base image and name the result.
# usage: files-image.sh IMAGE BASE_IMAGE FOLDER ENTRYPOINT_JSON LABEL [VARIABLE=VALUE...]
set -euo pipefail

image=$1 base=$2 folder=$3 entrypoint=$4 label=$5
shift 5
variables=()
for variable in "$@"; do
  variables+=(--change "ENV $variable")
done

container=$label-build-$(basename "${image/:/-}")
trap 'docker rm -f "$container" >/dev/null 2>&1 || true' EXIT
docker rm -f "$container" >/dev/null 2>&1 || true

docker create --name "$container" --label "metalserve.lab=$label" "$base" /bin/true
docker cp "$folder" "$container:/opt/engine"
docker commit --change "ENTRYPOINT $entrypoint" --change 'CMD []' --change "LABEL metalserve.lab=$label" "${variables[@]}" "$container" "$image"
