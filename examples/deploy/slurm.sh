#!/bin/bash
# phalanx under Slurm: a Ray cluster for one job, and the server on its first node. Run from the checkout, on a disk
# that all nodes share, with the requirements in .venv:
#
#     sbatch --nodes=2 examples/deploy/slurm.sh configs/two-node-cpu.yaml [more arguments of serve]
#
# The log has the server's URL. `scancel ID` ends everything in order.
#SBATCH --job-name=phalanx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=phalanx-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export PATH="$PWD/.venv/bin:$PATH"
port=${RAY_PORT:-6379}

# a token of this job's own: other users of these nodes must not be able to use the cluster
umask 077
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH"
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 143' TERM

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")
head_ip=$("${on_head[@]}" hostname -I | awk '{print $1}')
address=$head_ip:$port

"${on_head[@]}" ray start --head --block --port="$port" --node-ip-address="$head_ip" --disable-usage-stats &
for _ in $(seq 60); do
    ray health-check --address "$address" >/dev/null 2>&1 && break
    sleep 2
done
if ((${#nodes[@]} > 1)); then
    srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 --exclude="${nodes[0]}" \
        ray start --block --address="$address" --disable-usage-stats &
fi
# in the background, so that this script hears SIGTERM meanwhile; the ranks' placement waits for the other nodes
"${on_head[@]}" python -m launcher serve "$@" --ray-address "$address" &
wait $!
