#!/bin/bash
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
#
# Make a Docker image from the distribution's packages, without an image hub.
# usage: rootfs.sh IMAGE SUITE SOURCES_LIST APT_CONF PACKAGE,PACKAGE,... OVERLAY_DIR COMMAND_JSON LABEL
# The image gets its name only when it is whole; an interrupted run leaves at most a temporary folder, which the next removes.
set -euo pipefail

image=$1 suite=$2 sources=$3 apt_conf=$4 packages=$5 overlay=$6 command=$7 label=$8

work=$(mktemp -d --tmpdir metalserve-lab-rootfs.XXXXXXXX)
trap 'rm -rf "$work"' EXIT
# Killed runs cannot clean up after themselves.
find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'metalserve-lab-rootfs.*' -mmin +180 -exec rm -rf {} +

# Certificates this host trusts and the package ca-certificates does not bring (a mirror's or a proxy's own CA).
mkdir -p "$work/ca" "$work/overlay"
if [ -d "$overlay" ]; then
  cp -a "$overlay/." "$work/overlay/"
fi
awk -v folder="$work/ca" '
  /-----BEGIN CERTIFICATE-----/ { n++; file = sprintf("%s/host-%03d.crt", folder, n) }
  file { print > file }
  /-----END CERTIFICATE-----/ { close(file); file = "" }
' /etc/ssl/certs/ca-certificates.crt 2>/dev/null || true

cat >"$work/customize" <<'HOOK'
#!/bin/bash
# Runs with the new root as $1, before it is packed.
set -euo pipefail
root=$1
ca=$(dirname "$0")/ca
known=$(mktemp)
trap 'rm -f "$known"' EXIT
cat "$root"/usr/share/ca-certificates/mozilla/*.crt 2>/dev/null | tr -d '\r\n' >"$known" || true
extra=0
for certificate in "$ca"/*.crt; do
  [ -e "$certificate" ] || continue
  if ! grep -qF "$(tr -d '\r\n' <"$certificate")" "$known"; then
    install -D -m 0644 "$certificate" "$root/usr/local/share/ca-certificates/metalserve-lab-$(basename "$certificate")"
    extra=1
  fi
done
if [ "$extra" = 1 ] && [ -x "$root/usr/sbin/update-ca-certificates" ]; then
  chroot "$root" update-ca-certificates >/dev/null
fi
cp -a --no-preserve=ownership "$(dirname "$0")/overlay/." "$root/"
if [ -d /etc/apt/auth.conf.d ]; then
  find /etc/apt/auth.conf.d -maxdepth 1 -name '*.conf' -exec install -m 0600 -t "$root/etc/apt/auth.conf.d" {} +
fi
if [ -x "$root/usr/local/sbin/metalserve-lab-image" ]; then
  chroot "$root" /usr/local/sbin/metalserve-lab-image
  rm "$root/usr/local/sbin/metalserve-lab-image"
fi
: >"$root/etc/machine-id"
HOOK
chmod 0755 "$work/customize"

mmdebstrap --mode=root --variant=minbase --include="$packages" --aptopt="$apt_conf" \
  --customize-hook="$work/customize \"\$1\"" "$suite" "$work/root.tar" "$sources"
docker import --change "CMD $command" --change "LABEL metalserve.lab=$label" "$work/root.tar" "$image"
