#!/usr/bin/env bash
# Hosts made of this one machine: network namespaces on a bridge, each with a link of limited rate.
#
#   benchmarks/hosts.sh up 4 200mbit     four hosts, djhost0 ... djhost3, 10.77.0.1 ... 10.77.0.4
#   benchmarks/hosts.sh down             removes them, also what an interrupted "up" left behind
#
# The rate (a rate of tc, such as 200mbit or 1gbit) holds for each host and direction, as with a
# full-duplex network card. Needs root. Start a program in each with benchmarks/run_on_hosts.py.
set -euo pipefail

BRIDGE=djbridge

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

down() {
    for name in $(ip netns list | awk '/^djhost[0-9]+/ {print $1}'); do
        ip netns pids "$name" | xargs -r kill -9
        ip netns delete "$name"
        rm -rf "/etc/netns/$name"
    done
    for k in $(ip -o link show type veth | grep -o 'djport[0-9]*' | sort -u); do
        ip link delete "$k" 2>/dev/null || true
    done
    ip link delete "$BRIDGE" 2>/dev/null || true
}

up() {
    local count=$1 rate=$2
    trap 'down; echo "hosts.sh: nothing is left of the hosts that could not be made" >&2' ERR
    ip link add "$BRIDGE" type bridge
    ip link set "$BRIDGE" up
    for ((k = 0; k < count; k++)); do
        local name=djhost$k address=10.77.0.$((k + 1))
        ip netns add "$name"
        ip link add "djport$k" type veth peer name eth0 netns "$name"
        ip link set "djport$k" master "$BRIDGE" up
        ip -n "$name" link set lo up
        ip -n "$name" address add "$address/24" dev eth0
        ip -n "$name" link set eth0 up
        # A burst of a few packets of 64 KB, which is what segmentation offload hands over.
        ip netns exec "$name" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 200ms
        tc qdisc add dev "djport$k" root tbf rate "$rate" burst 256kb latency 200ms
        # gloo looks up the machine's own name to find the address that others can reach.
        mkdir -p "/etc/netns/$name"
        printf '127.0.0.1 localhost\n%s %s\n' "$address" "$(hostname)" >"/etc/netns/$name/hosts"
    done
    echo "$count hosts, $rate each way: djhost0 to djhost$((count - 1)), from 10.77.0.1 on"
}

[[ $# -ge 1 ]] || usage
[[ $EUID -eq 0 ]] || { echo "hosts.sh: making network namespaces needs root" >&2; exit 2; }
case $1 in
    up)
        [[ $# -eq 3 && $2 =~ ^[1-9][0-9]?$ ]] || usage
        down
        up "$2" "$3"
        ;;
    down) down ;;
    *) usage ;;
esac
