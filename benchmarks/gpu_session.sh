#!/usr/bin/env bash
# What to run on a GPU that can be had for a quarter of an hour: 12 minutes, by worth, offline.
#
#   benchmarks/gpu_session.sh OUT DATA      DATA has the folder cifar10, see configs/cifar10.py
#   benchmarks/gpu_session.sh OUT --tiny    a rehearsal of every part, on any device
#
# checks   a minute: the device, and a hundred steps of the quickstart.
# small    steps of ResNet-20 with 8 replicas: batches from the host or data.on_device, replicas at
#          once or one after the other.
# fast     the arms of airbench94; resnet  those of ResNet-20 (benchmarks/evidence/trainings.py).
# report   benchmarks/speed/gpu_report.py.
#
# OUT/parts.tsv gets a line as a part ends: name, exit code, seconds; OUT/NAME.log its output. A part
# that fails or takes too long does not stop the others; none begins after GPU_SESSION_S seconds.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(realpath "$1") || exit 2
script=$(realpath "$0") data=$2 fields=(--config.epochs=0 --config.log.every=50 --config.eval.every=0)
if [ "$data" = --tiny ]; then
    steps=2 tiny=(--tiny)
    small=(--config.data.{train_images=256,val_images=128,path=generated} --config.model.{blocks=1,width=4})
    small+=(--config.lr_schedule.warmup=0)
else
    data=$(realpath "$2") && [ -d "$data/cifar10" ] || { echo "$2 has no folder cifar10" >&2; exit 2; }
    steps=400 tiny=() small=(--config.data.path="$data/cifar10")
fi
cd "$(dirname "$script")/.." || exit 2

checks() {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python -c "import jax; print(jax.__version__, jax.devices())"
    python train.py --config configs/quickstart.py "${fields[@]}" --config.lr_schedule.warmup=0 \
        --config.steps=$((steps < 100 ? steps : 100)) --workdir "$out/quickstart"
}

small() {
    for resident in False True; do
        for one in False True; do
            python train.py --config configs/cifar10.py:momentum_sgd "${fields[@]}" "${small[@]}" \
                --config.data.on_device=$resident --config.mesh.sequential_replicas=$one \
                --config.steps=$steps --workdir "$out/small/on_device_$resident-sequential_$one"
        done
    done
}

arms() { # the trainings with a word in their names
    local all=(python benchmarks/evidence/trainings.py --root "$out/arms" --only "$1")
    mkdir -p "$out/arms"
    [ "$data" = --tiny ] && { "${all[@]}" --list; return; }
    ln -sfn "$data" "$out/arms/data"
    "${all[@]}" --at_once 4 --config.data.on_device=True --config.mesh.sequential_replicas=False
}

fast() { arms cifar10_fast; }
resnet() { arms 15-seed; }
report() { python benchmarks/speed/gpu_report.py --minutes 5 --out "$out/report" "${tiny[@]}"; }

if [ $# = 3 ]; then # a part, in a process that `timeout` can end with all that it has started
    trap 'exit 143' TERM # once the command at work has ended; else timeout would not wait for that
    "$3"
    exit
fi
end=$((SECONDS + ${GPU_SESSION_S:-720})) failed=0
for part in checks:60 small:120 fast:150 resnet:150 report:330; do
    name=${part%:*} most=${part#*:} left=$((end - SECONDS)) began=$SECONDS code="not begun"
    if [ "$left" -gt 0 ]; then
        timeout -k 10 "$((most < left ? most : left))" "$script" "$out" "$data" "$name" > "$out/$name.log" 2>&1
        code=$?
    fi
    [ "$code" = 0 ] || failed=1
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" | tee -a "$out/parts.tsv"
done
exit $failed
