#!/usr/bin/env bash
# One training on several hosts by mpirun (Open MPI or MPICH): it starts the ranks over ssh.
#
#     clusters/mpi/train.sh hosts.txt 8 ddp_basics/train.py --epochs 5     # eight ranks on each host
#     RSH=clusters/lab_ssh.sh python clusters/lab.py exec 0 -- clusters/mpi/train.sh hosts.txt 1 SCRIPT
#
# hosts.txt has a name a line. Python, this repository and the data have one path on all hosts.
set -u

fail() {
    echo "train.sh: error: $1" >&2
    exit 2
}
[ $# -ge 3 ] || fail "needs a file of hosts, the ranks on each, and a script"
[ -f "$1" ] || fail "there is no file $1"
[ -f "$3" ] || fail "there is no script $3"
[ "$2" -gt 0 ] 2>/dev/null || fail "'$2' is no number of ranks"
mapfile -t hosts < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$1")
[ ${#hosts[@]} -gt 0 ] || fail "$1 names no host"
ranks=$2
shift 2
MPIRUN=${MPIRUN:-mpirun}
command -v "$MPIRUN" >/dev/null || fail "there is no $MPIRUN here: apt install openmpi-bin, or mpich"

RSH=${RSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}
for host in "${hosts[@]}"; do # before anything runs on any of them
    said=$($RSH "$host" true 2>&1 </dev/null) || fail "$host cannot be reached: ${said##*$'\n'}"
done

# mpirun tells a rank its number, and not where the others are.
export MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 10000))}
list=$(printf ",%s" "${hosts[@]}")
script=("$(command -v python)" -u "$(dirname "${BASH_SOURCE[0]}")/../from_any_launcher.py" "$@")
if "$MPIRUN" --version | grep -qE "Open ?(MPI|RTE)"; then
    # --bind-to none: it would give each rank one core, whatever OMP_NUM_THREADS says.
    root=$([ "$(id -u)" = 0 ] && echo --allow-run-as-root)
    exec "$MPIRUN" $root --host "$(printf "%s" "${list:1}" | sed "s/,/:$ranks,/g"):$ranks" --bind-to none \
        --mca plm_rsh_agent "$RSH" -x MASTER_ADDR -x MASTER_PORT -x PATH "${script[@]}"
fi
set -- -launcher ssh -hosts "${list:1}" -ppn "$ranks" -n $((ranks * ${#hosts[@]}))
exec "$MPIRUN" "$@" -launcher-exec "$RSH" "${script[@]}"
