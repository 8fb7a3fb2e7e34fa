#!/bin/sh
# The first process of the User-Mode Linux kernel that uml.sh boots: mounts, modules, the testbed, and off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
here=$(cd "$(dirname "$0")" && pwd)
mount -t proc none /proc
mount -t sysfs none /sys
for folder in /run /tmp /dev/shm; do mount -t tmpfs none $folder; done
echo "UML-BEGIN $(uname -r)"
cd "$here/../.." || exit 1
"$UML_PYTHON" tests/wan/uml_modules.py load
ip link set lo up
"$UML_PYTHON" -m benchmarks.netbed probe &&
  "$UML_PYTHON" -m benchmarks.netbed link tests/wan/lossy.toml --engine netem &&
  "$UML_PYTHON" -m benchmarks.netbed clean
echo "UML-RC $?"
"$UML_PYTHON" tests/wan/uml_modules.py off
