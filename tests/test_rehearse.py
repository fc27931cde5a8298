"""`cluster.rehearse`: links limited by tc while a process lives; in a network namespace."""

import shutil
import subprocess
import sys

import pytest
import tiny
from refusals import refused

from decent_jax import train
from decent_jax.cluster import rehearse
from decent_jax.train import config as config_lib

NAMESPACE = ["unshare", "--net"]


def namespaces():
    """Whether this user may make network namespaces, and links in them."""
    if not all(map(shutil.which, ("unshare", "tc", "ip"))):
        return False
    program = "ip link set lo up && ip link add a0 type veth peer name b0"
    return not subprocess.run([*NAMESPACE, "sh", "-c", program], capture_output=True).returncode


in_namespace = pytest.mark.skipif(not namespaces(), reason="no tc, or no right to namespaces")


@pytest.mark.parametrize("rate", ["75", "fast", "75mbit; reboot", "1kbit", "900gbit", "0mbit"])
def test_rates_that_are_none(rate):
    with refused("cluster.rehearse", rate):
        config_lib.validate(tiny.waves(cluster={"rehearse": rate}))


def test_a_run_of_one_process_has_no_links(tmp_path):
    with refused("cluster.rehearse", "75mbit"):
        train.run(tiny.waves(cluster={"rehearse": "75mbit"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_process_of_each_host_is_enough():
    assert rehearse.slow_down("75mbit", ["a", "b", "a"], 2, "localhost:9") == ""


# Started in a namespace: limits a link, says so, and lives until its input ends.
PROGRAM = """
import sys
from decent_jax.cluster import rehearse
print(rehearse.slow_down(*eval(sys.argv[1])), flush=True)
sys.stdin.read()
"""

# Runs inside: starts PROGRAM, and says what limit the link has while it lives and afterwards.
DRIVER = """
import subprocess, sys, time

link, how, setup, arguments, program = sys.argv[1:]
subprocess.run(["sh", "-ec", setup], check=True)

def limits():
    shown = ["tc", "qdisc", "show", "dev", link, "root"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout

argv = [sys.executable, "-c", program, arguments]
with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
    words = process.stdout.readline()
    print(limits().split())
    if how == "kill":
        process.kill()
while "dec0:" in limits():
    time.sleep(0.05)
print(limits().split(), "limited" in words)
"""


def driven(link, how, setup, *arguments):
    program = [sys.executable, "-c", DRIVER, link, how, setup, repr(arguments), PROGRAM]
    made = subprocess.run([*NAMESPACE, *program], capture_output=True, text=True, timeout=120)
    return made.stdout.splitlines(), made.stderr


@in_namespace
@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_limit_goes_with_the_process(how):
    """On one host the loopback is what its processes share."""
    (during, after), _ = driven("lo", how, "ip link set lo up", "20mbit", ["a", "a"], 0, "a:9")
    assert "'tbf', 'dec0:'" in during and "'20Mbit'" in during
    assert "noqueue" in after and after.endswith("True")


@in_namespace
def test_between_hosts_the_card_that_leads_to_process_0_is_limited():
    setup = "ip link add a0 type veth peer name b0 && ip link set a0 up && ip link set b0 up && "
    setup += "ip addr add 10.78.0.1/24 dev a0"
    (during, _), _ = driven("a0", "end", setup, "75mbit", ["a", "b"], 0, "10.78.0.2:9")
    assert "'tbf', 'dec0:'" in during and "'75Mbit'" in during


@in_namespace
def test_a_limit_of_somebody_else_stays():
    setup = "tc qdisc add dev lo root handle 7: tbf rate 1gbit burst 256kb latency 200ms"
    (during, after), words = driven("lo", "end", setup, "20mbit", ["a"], 0, "a:9")
    assert "'7:'" in during and "'7:'" in after and after.endswith("False")
    assert "ConfigError: cluster.rehearse=20mbit: lo has a limit already" in words


@in_namespace
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_who_may_not_is_told_so():
    argv = [*NAMESPACE, "setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    argv += [sys.executable, "-c", PROGRAM, repr(("20mbit", ["a"], 0, "a:9"))]
    made = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert made.returncode and "ConfigError: cluster.rehearse=20mbit: tc refuses" in made.stderr
