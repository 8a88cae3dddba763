#!/usr/bin/env bash
# Shared by scripts/demo and scripts/test; sourced, with the checkout as the working directory.

MINIMUM_PYTHON=3.12
# Who made .venv decides who may remove it.
MADE_BY=$(basename "$0")

# die SENTENCE [LOG]: one sentence, and where there is a log its end and its path.
die() {
  [ -t 2 ] && printf '\r\033[K' >&2
  printf '%s: %s\n' "$MADE_BY" "$1" >&2
  if [ -n "${2:-}" ] && [ -s "$2" ]; then
    printf -- '--- the end of %s\n' "$2" >&2
    tail -n 25 "$2" | cut -c -400 | sed 's/^/    /' >&2
    printf -- '--- the whole log is %s\n' "$PWD/$2" >&2
  fi
  exit 1
}

# elapsed SECONDS: as "1m05s".
elapsed() { printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); }

# part NAME COMMAND...: run COMMAND with a headline before it and its time after it.
part() {
  local begin=$SECONDS name=$1
  shift
  echo "== $name"
  "$@"
  echo "== $name: $(elapsed $((SECONDS - begin)))"
}

# as_root COMMAND...: through sudo unless this is root already.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -- "$@"; fi
}

# what_now LOG: the task that runs by the log of ansible-playbook, else the log's last line.
what_now() {
  local task
  task=$(grep -aoE '^TASK \[[^]]*' "$1" | tail -n 1 | sed -E 's/^TASK \[(metal\.serve\.)?//') || true
  printf '%s' "${task:-$(tail -n 1 "$1")}" | tr -cd '[:print:]' | cut -c -70
}

# end_group PID: as Ctrl-C would, and for who has not listened within 15 seconds as a shutdown would.
end_group() {
  kill -INT -- "-$1" 2>/dev/null || true
  for _ in $(seq 75); do
    kill -0 "$1" 2>/dev/null || break
    sleep 0.2
  done
  kill -TERM -- "-$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
}

# step TITLE LOG COMMAND...: run COMMAND with its output in LOG and show what it is doing and for how long.
# On a terminal one line moves; elsewhere a line comes every 30 seconds. Ctrl-C reaches the command and ends the script.
step() {
  local title=$1 log=$2 begin=$SECONDS code=0 said=0 child detail
  shift 2
  mkdir -p "$(dirname "$log")"
  : >"$log"
  # Job control gives the command a process group of its own, so that all of it can be told to stop.
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  child=$!
  set +m
  # shellcheck disable=SC2064 # this command's number, not a later one's
  trap "end_group $child; printf '\n%s: stopped; run it again to go on\n' '$MADE_BY' >&2; exit 130" INT TERM
  [ -t 1 ] || printf '%s ...\n' "$title"
  while kill -0 "$child" 2>/dev/null; do
    detail=$(what_now "$log")
    if [ -t 1 ]; then
      printf '\r\033[K%s  %s  %s' "$title" "$(elapsed $((SECONDS - begin)))" "$detail"
    elif [ $((SECONDS - begin - said)) -ge 30 ]; then
      said=$((SECONDS - begin))
      printf '  %s  %s\n' "$(elapsed "$said")" "$detail"
    fi
    sleep 0.5
  done
  wait "$child" || code=$?
  trap - INT TERM
  [ -t 1 ] && printf '\r\033[K'
  printf '%-44s %s  %s\n' "$title" "$([ "$code" -eq 0 ] && echo ok || echo FAILED)" "$(elapsed $((SECONDS - begin)))"
  return "$code"
}

# in_fresh_shell FUNCTION...: one of these functions, with errors ending it: in a condition a shell goes on after them.
in_fresh_shell() {
  # shellcheck disable=SC2016 # the inner shell expands it
  bash -euo pipefail -c 'source scripts/lib/common.sh; "$@"' "$MADE_BY" "$@"
}

# unfit_for_lab "ID VERSION": say why no lab can be made of this system's packages; nothing where it can.
unfit_for_lab() {
  case "$1" in
    "debian 12" | "debian 13" | "ubuntu 24.04") ;;
    "ubuntu 22.04")
      if ! grep -qsE '^lab_suite: *[a-z"]' inventory/lab/group_vars/all/*.yml; then
        echo "the Python 3.10 of Ubuntu 22.04 is too old for the lab's engine: let the lab be made of another suite's packages," \
          "with the two lines that docs/lab.md gives for inventory/lab/group_vars/all/lab.yml, and run this again"
      fi
      ;;
    *) echo "this machine runs '$1', and the lab is made of the packages of Debian 12 or 13 or Ubuntu 22.04 or 24.04" ;;
  esac
}

# usable_python COMMAND: whether it is new enough and can make virtual environments. A version manager's shim may exist
# and still run nothing, so it is run.
usable_python() {
  "$1" -c "import ensurepip, sys, venv
sys.exit(sys.version_info[:2] < tuple(int(n) for n in '$MINIMUM_PYTHON'.split('.')))" >/dev/null 2>&1
}

# find_python: print the newest usable Python.
find_python() {
  local version candidate
  for version in 3.14 3.13 3.12; do
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
      if usable_python "$candidate"; then
        command -v "$candidate"
        return 0
      fi
    done
  done
  if usable_python python3; then
    command -v python3
    return 0
  fi
  return 1
}

# install_python_dependencies LOCK: .venv with exactly the packages of LOCK; nothing to do while LOCK is unchanged.
install_python_dependencies() {
  local lock=$1 stamp=.venv/.metalserve-locks python hash
  hash=$(sha256sum <"$lock" | cut -d ' ' -f 1)
  if grep -qxF "$lock $hash" "$stamp" 2>/dev/null && .venv/bin/python -c '' 2>/dev/null; then
    return 0
  fi
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || {
      echo "no Python $MINIMUM_PYTHON or newer with venv was found (python3.14, python3.13, python3.12, pyenv's): install" \
        "one, for example with 'apt-get install python3.13-venv' on Debian 13, 'apt-get install python3.12-venv' on" \
        "Ubuntu 24.04, or 'pyenv install 3.12' elsewhere" >&2
      return 1
    }
    "$python" -m venv --clear .venv
    echo "$MADE_BY" >.venv/.metalserve-made-by
  fi
  .venv/bin/python -m pip install --disable-pip-version-check --no-input --require-hashes -r "$lock"
  { grep -v "^$lock " "$stamp" 2>/dev/null || true; echo "$lock $hash"; } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

# missing_packages PACKAGE...: print those that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}

# install_packages_once PACKAGE...: from the distribution; nothing to do when all are there.
install_packages_once() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -gt 0 ] || return 0
  as_root apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

# docker_answers: whether a Docker daemon is there and may be used.
docker_answers() { command -v docker >/dev/null && as_root docker info >/dev/null 2>&1; }

# ensure_docker LOG: a running Docker is left as it is; a stopped one is started, a missing one comes from the distribution.
# What was done is noted in .lab/made, so that it can be undone.
ensure_docker() {
  local log=$1 attempt wanted=(mmdebstrap) before
  mkdir -p .lab
  if ! docker_answers && ! { command -v dockerd && command -v docker; } >/dev/null; then
    wanted+=(docker.io iptables)
    # Newer distributions keep the command line apart from the daemon.
    if apt-cache show docker-cli >/dev/null 2>&1; then wanted+=(docker-cli); fi
  fi
  if [ -n "$(missing_packages "${wanted[@]}")" ]; then
    before=$(dpkg-query -W -f '${Package}\n' | sort)
    install_packages_once "${wanted[@]}"
    dpkg-query -W -f '${Package}\n' | sort | comm -13 <(printf '%s\n' "$before") - | sed 's/^/package /' >>.lab/made
  fi
  docker_answers && return 0
  if [ -d /run/systemd/system ]; then
    as_root systemctl start docker
  else
    # Without systemd nothing else would start it.
    as_root sh -c "nohup setsid dockerd >'$PWD/$log.dockerd' 2>&1 </dev/null & echo \$! >'$PWD/.lab/dockerd.pid'"
  fi
  echo started >>.lab/made
  for attempt in $(seq 60); do
    docker_answers && return 0
    sleep 1
  done
  echo "Docker did not answer within $attempt seconds of its start; see 'journalctl -u docker' or $log.dockerd" >&2
  return 1
}
