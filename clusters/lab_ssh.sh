#!/bin/sh
# What ssh is on real hosts: lab_ssh.sh [-x] HOST COMMAND runs it on a host of the lab, see lab.py.
[ "$1" = -x ] && shift
host=${1#host}
shift
exec "${PYTHON:-python3}" "$(cd "$(dirname "$0")" && pwd)/lab.py" exec "$host" -- sh -c "$*"
