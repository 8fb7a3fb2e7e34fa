#!/bin/sh
# The testbed with the real netem, in a User-Mode Linux kernel (Debian: apt install user-mode-linux), where the machine's
# own kernel has none. Needs no root. Everything but memory file systems is read-only in there. What runs is
# tests/wan/in_uml.sh; what it prints comes out here. Exit status: its own; 77 if there is no User-Mode Linux.
#
#   tests/wan/uml.sh [PYTHON]
set -eu
command -v linux.uml >/dev/null || { echo "no User-Mode Linux here: apt install user-mode-linux"; exit 77; }
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-$here/../../.venv/bin/python}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
timeout -k 5 "${UML_SECONDS:-120}" linux.uml mem=768M root=/dev/root rootfstype=hostfs rootflags=/ ro quiet \
  init="$here/in_uml.sh" con=null con0=null,fd:1 UML_PYTHON="$python" </dev/null >"$log" 2>&1 || true
tr -d '\r' <"$log" | sed -n '/^UML-BEGIN/,$p'
grep -q '^UML-RC 0' "$log"
