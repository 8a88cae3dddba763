#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Download the wheels of requirement files for another machine's Python, with this host's pip and its settings.
# usage: wheelhouse.sh FOLDER PYTHON_WITH_PIP TARGET_VERSION REQUIREMENTS... -- PLATFORM_TAG...
# FOLDER appears when it is whole. An interrupted run keeps its wheels in FOLDER.partial, and the next one goes on there.
set -euo pipefail

folder=$1 python=$2 version=$3
shift 3
requirements=() platforms=()
while [ "$1" != "--" ]; do
  requirements+=(--requirement "$1")
  shift
done
shift
for tag in "$@"; do
  platforms+=(--platform "$tag")
done

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if [ -d "$folder" ]; then
  exit 0
fi

download() {
  "$python" -m pip download --disable-pip-version-check --no-input --no-deps --only-binary=:all: \
    --python-version "$version" "${platforms[@]}" --dest "$folder.partial" "${requirements[@]}" "$@"
}

# PyTorch's CPU builds have an index of their own; a host whose pip already knows them needs no second one.
download || download --extra-index-url https://download.pytorch.org/whl/cpu
mv "$folder.partial" "$folder"
