#!/usr/bin/env bash
# One process for each GPU under Open MPI (any version; MPI itself carries no data):
#
#   launch/mpirun.sh -np 8 --hostfile hosts.txt -- \
#       --config configs/gpt2_openwebtext.py --workdir /shared/runs/gpt2
#
# What stands before the -- goes to mpirun, the rest to train.py. COORDINATOR=host:port says where
# process 0 runs, which is the first host of the hostfile; without it, this host. LOCAL_GPUS=all
# gives each process all GPUs of its host (then start one a host: -N 1).
set -euo pipefail

if [[ ${1:-} == --as-process ]]; then # started by mpirun, once for every process
    shift
    [[ ${LOCAL_GPUS:-one} == all ]] || export JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK
    exec python train.py "$@" \
        --config.cluster.coordinator="$COORDINATOR" \
        --config.cluster.num_processes="$OMPI_COMM_WORLD_SIZE" \
        --config.cluster.process_id="$OMPI_COMM_WORLD_RANK"
fi

before=()
while [[ $# -gt 0 && $1 != -- ]]; do
    before+=("$1")
    shift
done
if [[ $# -lt 2 ]]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
shift
export COORDINATOR=${COORDINATOR:-$(hostname):9876}
# Processes know each other by a secret.
export DECENT_JAX_SECRET=${DECENT_JAX_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
exec mpirun "${before[@]}" -x COORDINATOR -x DECENT_JAX_SECRET -x LOCAL_GPUS="${LOCAL_GPUS:-one}" \
    -x PATH -x PYTHONPATH --bind-to none "$0" --as-process "$@"
