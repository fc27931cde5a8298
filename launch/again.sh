#!/usr/bin/env bash
# Start a command again in the same container when it died, or ended because another process did:
#
#   launch/again.sh python train.py --config FILE --workdir DIR --config.recovery.every=50
#
# So /dev/shm stays, with the in-memory checkpoints of the process (recovery.every), and all
# processes resume from them. It ends with the command's code where that is done (0), failed (1) or
# refused (2), or where it was interrupted and has saved (130, 143); after SIGTERM, which it passes
# on (also as process 1); and after AGAIN starts (20).
set -u

stopped=
stop() {
    stopped=yes
    kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

for ((k = 0; k < ${AGAIN:-20}; k++)); do
    "$@" &
    child=$!
    while true; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break # else a signal has ended the waiting
    done
    [[ -n $stopped || $code -le 2 || $code == 130 || $code == 143 ]] && exit "$code"
    echo "again.sh: the process ended with code $code" >&2
done
exit "$code"
