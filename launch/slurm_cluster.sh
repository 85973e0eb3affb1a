#!/usr/bin/env bash
# A SLURM cluster of this machine's own, to try launch/slurm.sbatch on: three nodes, of which n1 and n2 have one pretended
# GPU each, and everything it writes in one folder. Needs root, and installs nothing.
#   usage: launch/slurm_cluster.sh start|status|stop FOLDER
#   SLURM_CONF=FOLDER/slurm.conf sbatch ...       how sbatch, squeue, scancel and scontrol reach it
#   PORT=17000                                    the first of four ports
#   SIGNAL=user                                   preemption sends the job's own signal instead of SIGTERM
# Partitions: gpu (n1, n2; preempted jobs go back into the queue), cancel (the same nodes; preempted jobs are cancelled),
# urgent (the same nodes; preempts both), plain (n3, without a GPU). Another user needs access to FOLDER.
set -euo pipefail

usage() {
    sed -n '2,/^set/s/^# //p' "$0" >&2
    exit 2
}

require_packages() {
    local missing=()
    for program in munged slurmctld slurmd sbatch; do
        PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || missing+=("$program")
    done
    if ((${#missing[@]})); then
        echo "there is no ${missing[*]} here: on Debian, apt-get install munge slurmctld slurmd slurm-client" >&2
        exit 2
    fi
    if ((EUID)); then
        echo "slurmd starts jobs of other users, which needs root" >&2
        exit 2
    fi
}

write_configuration() {
    local port=${PORT:-17000} preemption=''
    if [[ ${SIGNAL:-} == user ]]; then preemption=SlurmctldParameters=preempt_send_user_signal; fi
    mkdir -p "$folder/state" "$folder/spool" "$folder/logs" "$folder/daemons"
    chmod 755 "$folder"
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    # Daemons and jobs see this file in place of /etc/hosts: launch/slurm.sbatch finds the first node by its name.
    { cat /etc/hosts && echo "127.0.0.1 n1 n2 n3"; } >"$folder/hosts"
    cat >"$folder/slurm.conf" <<CONFIGURATION
ClusterName=trial
FirstJobId=$port
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdTimeout=20
MinJobAge=86400
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$preemption
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1 RealMemory=4000 Gres=gpu:1
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=1 RealMemory=4000 Gres=gpu:1
NodeName=n3 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 3)) CPUs=1 RealMemory=4000
PartitionName=gpu Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=cancel Nodes=n1,n2 PriorityTier=1 PreemptMode=CANCEL GraceTime=60
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
PartitionName=plain Nodes=n3
CONFIGURATION
    printf 'NodeName=n1 Name=gpu File=/dev/null\nNodeName=n2 Name=gpu File=/dev/zero\n' >"$folder/gres.conf"
}

# A process of the cluster, and all that it starts, bears the folder in its environment: that is how it is found again.
start_daemon() {
    local name=$1
    shift
    # shellcheck disable=SC2016  # the inner shell, in the daemon's own view of the files, expands them
    SPMDRL_CLUSTER=$folder SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin setsid \
        unshare --mount sh -c 'mount --bind "$SPMDRL_CLUSTER/hosts" /etc/hosts && exec "$@"' sh "$@" \
        </dev/null >>"$folder/logs/$name" 2>&1 &
    echo $! >"$folder/daemons/$name"
}

start_node() {
    start_daemon "$1" slurmd -D -N "$1"
}

processes() {
    grep -lzsxF "SPMDRL_CLUSTER=$folder" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

start() {
    require_packages
    if [[ -n $(processes) ]]; then
        echo "the cluster of $folder is already there; launch/slurm_cluster.sh stop $folder ends it" >&2
        exit 2
    fi
    write_configuration
    # --force: the folder's own parents may be open to others, as those of a temporary folder are.
    start_daemon munged munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" --log-file="$folder/logs/munge.log"
    until [[ -S $folder/munge.socket ]]; do sleep 0.1; done
    start_daemon slurmctld slurmctld -D
    for node in n1 n2 n3; do start_node "$node"; done
    for _ in {1..60}; do
        if [[ $(sinfo --noheader --Node --format=%T 2>/dev/null | sort -u) == idle ]]; then
            echo "export SLURM_CONF=$folder/slurm.conf"
            return
        fi
        sleep 0.5
    done
    echo "the nodes did not come up within 30 s; $folder/logs says why" >&2
    stop
    exit 1
}

stop() {
    if [[ -n $(processes) ]]; then
        scancel --quiet --user="$(squeue --noheader --format=%u | sort -u | paste -sd,)" 2>/dev/null || true
        for _ in {1..90}; do
            [[ -n $(squeue --noheader 2>/dev/null) ]] || break
            sleep 0.5
        done
    fi
    for signal in TERM KILL; do
        for _ in {1..20}; do
            mapfile -t left < <(processes)
            ((${#left[@]})) || return 0
            kill -"$signal" "${left[@]}" 2>/dev/null || true
            sleep 0.5
        done
    done
}

if (($# != 2 && $# != 3)); then usage; fi
folder=$(realpath -m "$2")
host=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf
case $1 in
    start) start ;;
    node) start_node "$3" ;;
    status) sinfo --long --Node && squeue ;;
    stop) stop ;;
    *) usage ;;
esac
