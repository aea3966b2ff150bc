#!/usr/bin/env bash
# A Slurm cluster on this machine for tests: a login node, two compute nodes, two partitions.
#
#     clusters/slurm/test_cluster.sh COMMAND ...   # start it, run COMMAND on the login node, end it
#     clusters/slurm/test_cluster.sh bash          # a shell in which sinfo, sbatch, srun, squeue work
#
# The daemons are Slurm's own (Debian: apt install slurm-wlm munge), on hosts of ../lab.py: host0 is
# the login node and runs slurmctld; host1 and host2 compute. It needs root. Its files are in a temporary
# folder; all processes on the hosts end with it. Exit status: the command's; 2 if the cluster fails.
set -u
clusters=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export LAB=${LAB:-slurm}

fail() {
    echo "test_cluster.sh: error: $1" >&2
    exit 2
}
lab() { "${PYTHON:-python3}" "$clusters/lab.py" "$@"; }

[ $# -gt 0 ] || fail "a command is needed, such as sinfo or bash"
PATH=$PATH:/usr/sbin
for tool in slurmctld slurmd munged; do
    command -v $tool >/dev/null || fail "there is no $tool here: apt install slurm-wlm munge"
done
[ "$(id -u)" = 0 ] || fail "the daemons of Slurm need root"

folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
trap 'lab down; rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$folder"
lab up 3 >/dev/null || { trap 'rm -rf "$folder"' EXIT; exit 2; } # perhaps another lab has this name

export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
AuthType=auth/munge
# A requeued job waits until its old credential has expired: by default 120 s, at least 5 s.
AuthInfo=socket=$folder/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=40
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=10
# Some sites set this: when a rank ends with a status that is not 0, srun ends the other ranks after KillWait.
KillOnBadExit=1
# A node claims 96 cores and 8 GPUs, whatever this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=host[1-2] CPUs=96 RealMemory=4000 Gres=gpu:8
# Jobs of the partition "urgent" send jobs of "main" back to the queue.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=60 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=60 PreemptMode=OFF
END
# Empty files stand for the GPUs: jobs can request them, and Slurm counts them.
touch "$folder"/gpu{0..7}
echo "NodeName=host[1-2] Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
mkdir "$folder/state"
dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
chmod 400 "$folder/munge.key"
# One munged serves all hosts: they have their own networks, but share one file system.
lab exec 0 -- munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge.pid" --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" \
    || fail "munged does not start: $(tail -n 1 "$folder/munge.log")"
lab exec 0 -- slurmctld || fail "slurmctld does not start: $(tail -n 1 "$folder/slurmctld.log")"
for node in 1 2; do
    lab exec $node -- slurmd || fail "slurmd does not start: $(tail -n 1 "$folder/host$node.log")"
done
for _ in $(seq 200); do # until both nodes have reported
    [ "$(lab exec 0 -- sinfo --noheader --partition=main --states=idle --format=%D 2>&1)" = 2 ] && ready=yes && break
    sleep 0.05
done
[ "${ready:-}" ] || fail "the nodes do not report: $(lab exec 0 -- sinfo --list-reasons --noheader)
$(tail -n 1 "$folder/slurmctld.log")"

if [ -t 0 ]; then
    lab exec 0 -- "$@" # it may need the terminal
else
    lab exec 0 -- "$@" <&0 & # bash acts on a signal during `wait`, not during a command
    wait $!
fi
