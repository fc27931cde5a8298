"""Networks: DT-FM's published matrices, the file formats, and what is refused in which words."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from datafiles import DATA
from refusals import refuses

from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError
from decent_jax.planner import network as networks
from decent_jax.planner.network import BYTES_PER_GBIT, Link, from_matrices

THREE_MS = [[0, 1e-3, 2e-3], [1e-3, 0, 3e-3], [2e-3, 3e-3, 0]]
THREE_GBIT = np.array([[0, 1, 2], [1, 0, 4], [2, 4, 0]]) * BYTES_PER_GBIT


def test_presets_are_dtfms_published_matrices():
    cases = json.loads((DATA / "networks/dtfm_cases.json").read_text())["cases"]
    assert len(cases) == 5
    off_diagonal = ~np.eye(64, dtype=bool)
    cards_gbps = [[25.0] * 8, [5.0] * 8 + [1.25] * 32, [5.0] * 64, [2.0] * 64, [2.0] * 64]
    for number, case in enumerate(cases.values(), 1):
        network = networks.preset(f"dtfm_case{number}")
        ms, gbps = np.array(case["delay_ms"]), np.array(case["bandwidth_gbps"])
        np.testing.assert_allclose(
            network.latency_s[off_diagonal] * 1e3, ms[off_diagonal], rtol=1e-12
        )
        np.testing.assert_allclose(
            network.bandwidth_bytes_per_s[off_diagonal] / BYTES_PER_GBIT,
            gbps[off_diagonal],
            rtol=1e-12,
        )
        cards = network.nic_bytes_per_s / BYTES_PER_GBIT
        assert cards.tolist() == cards_gbps[number - 1]


def test_the_packaged_region_table_is_dtfms():
    table = json.loads((DATA / "networks/dtfm_regions.json").read_text())
    network = networks.regions(dict.fromkeys(table["ten_region_order"], 2))
    first = np.arange(10) * 2
    wanted_ms, wanted_gbps = (
        np.array(table[f"ten_region_{name}"]) for name in ("latency_ms", "bandwidth_gbps")
    )
    # The diagonal of the table is between two devices of one region.
    ms = network.latency_s[np.ix_(first, first + 1)] * 1e3
    gbps = network.bandwidth_bytes_per_s[np.ix_(first, first + 1)] / BYTES_PER_GBIT
    np.testing.assert_allclose(ms, wanted_ms, rtol=1e-12)
    np.testing.assert_allclose(gbps, wanted_gbps, rtol=1e-12)


def test_a_machines_card_is_its_fastest_link_out_unless_given(tmp_path):
    assert from_matrices(THREE_MS, THREE_GBIT).nic_bytes_per_s.tolist() == [2.5e8, 5e8, 5e8]
    assert from_matrices(THREE_MS, THREE_GBIT).names == ("node0/0", "node1/0", "node2/0")
    together = from_matrices(THREE_MS, THREE_GBIT, node=[0, 1, 1])
    assert together.nic_bytes_per_s.tolist() == [2.5e8, 2.5e8]
    alone = from_matrices(THREE_MS, THREE_GBIT, node=[0, 0, 0])
    assert alone.nic_bytes_per_s.tolist() == [np.inf]
    given = from_matrices(THREE_MS, THREE_GBIT, nic_bytes_per_s=[1e9, None, np.inf])
    assert given.nic_bytes_per_s.tolist() == [1e9, np.inf, np.inf]
    given.save(path := tmp_path / "network.json")
    assert json.loads(path.read_text())["nic_bytes_per_s"] == [1e9, None, None]


def test_take_reorders_everything_together():
    network = networks.cluster([2, 3, 1], networks.NVLINK, networks.ETHERNET_25G)
    network = dataclasses.replace(network, nic_bytes_per_s=np.array([1e9, 2e9, 3e9]))
    part = network.take([5, 1, 4, 0])
    assert part.names == ("node2/0", "node0/1", "node1/2", "node0/0")
    assert part.node.tolist() == [0, 1, 2, 1]
    assert part.nic_bytes_per_s.tolist() == [3e9, 1e9, 2e9]
    assert part.transfer_s(1, 3, 1e9) == network.transfer_s(1, 0, 1e9)
    assert part.transfer_s(0, 2, 1e9) == network.transfer_s(5, 4, 1e9)
    for devices in ([], [0, 0], [6], [-1]):
        with refuses(devices):
            network.take(devices)


def test_a_file_is_read_back_as_it_was(tmp_path):
    network = networks.regions({"Tokyo": 2, "Oregon": 1})
    path = tmp_path / "network.json"
    network.save(path)
    again = networks.load(path)
    assert again.names == network.names == ("Tokyo/0", "Tokyo/1", "Oregon/0")
    assert network.transfer_s(0, 1, 2.5e8) == 1 + 5e-3  # in the region, as fast as the card
    assert network.nic_bytes_per_s.tolist() == [2.5e8] * 3
    for name, values in dataclasses.asdict(network).items():
        np.testing.assert_array_equal(getattr(again, name), values)


def changed(matrix, *entries):
    matrix = np.array(matrix, object)
    for i, j, value in entries:
        matrix[i, j] = value
    return matrix.tolist()


@pytest.mark.parametrize(
    ("latency", "bandwidth", "named"),
    [
        (THREE_MS, changed(THREE_GBIT, (0, 1, None), (2, 1, None)), "bandwidth from a to b"),
        (changed(THREE_MS, (1, 0, float("nan"))), THREE_GBIT, "latency from b to a"),
        (THREE_MS, changed(THREE_GBIT, (1, 2, 0)), "bandwidth from b to c"),
        (THREE_MS, changed(THREE_GBIT, (0, 2, 1e8)), "bandwidth between a and c"),
        (np.array(THREE_MS) * 1e-6, THREE_GBIT, "1e-09 s"),
        (THREE_MS, THREE_GBIT / BYTES_PER_GBIT, "1 bytes/s"),
        (THREE_MS, THREE_GBIT * 1e6, "1.25e+14 bytes/s"),
        (THREE_MS, [[0, 1], [1]], "bandwidth_bytes_per_s"),
        ([[0, 1e-3], [1e-3, 0]], THREE_GBIT, "(2, 2) and (3, 3)"),
        ([], [], "latency_s"),
        (changed(THREE_MS, (0, 1, True)), THREE_GBIT, "latency_s"),
    ],
)
def test_what_cannot_be_a_network_is_refused_by_its_entry(latency, bandwidth, named):
    with refuses(named):
        from_matrices(latency, bandwidth, names=("a", "b", "c"))


def test_small_asymmetry_stays_and_large_can_be_symmetrized():
    slightly = changed(THREE_GBIT, (0, 2, 2.1e8))
    assert from_matrices(THREE_MS, slightly).bandwidth_bytes_per_s[0, 2] == 2.1e8
    # 40 us and 60 us are the same but for the clock.
    close = changed(THREE_MS, (0, 1, 40e-6), (1, 0, 60e-6))
    assert from_matrices(close, THREE_GBIT).latency_s[0, 1] == 40e-6
    network = from_matrices(
        changed(THREE_MS, (0, 1, 9e-3)), changed(THREE_GBIT, (0, 2, 1e7)), symmetrize=True
    )
    assert network.latency_s[0, 1] == network.latency_s[1, 0] == 9e-3
    assert network.bandwidth_bytes_per_s[0, 2] == network.bandwidth_bytes_per_s[2, 0] == 1e7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node", [0, 2, 2]),
        ("node", [0, 1]),
        ("node", [0, 0.5, 1]),
        ("node", [0, 1, True]),
        ("nic_bytes_per_s", [1e9, 0.0, 1e9]),
        ("nic_bytes_per_s", [1e9]),
        ("names", ["a", "a", "b"]),
        ("names", "abc"),
    ],
)
def test_fields_of_devices_are_checked(name, value):
    with refuses(name, value):
        from_matrices(THREE_MS, THREE_GBIT, **{name: value})


def test_clusters_and_presets():
    insides, betweens = {"nvlink": (5, 300e9), "pcie": (10, 25e9)}, {"25gbe": 30, "100gb_ib": 5}
    for (inside, link), (between, us) in itertools.product(insides.items(), betweens.items()):
        network, rate = networks.preset(f"{inside}_{between}", 3, 4), {30: 3.125e9, 5: 12.5e9}[us]
        assert (network.num_devices, network.num_nodes) == (12, 3)
        assert (network.latency_s[0, 3] * 1e6, network.bandwidth_bytes_per_s[0, 3]) == link
        assert (network.latency_s[0, 4] * 1e6, network.bandwidth_bytes_per_s[0, 4]) == (us, rate)
        assert network.nic_bytes_per_s.tolist() == [rate] * 3
    uneven = networks.cluster([1, 3], Link(0.0, 1e10), Link(1e-3, 1e9))
    assert uneven.node.tolist() == [0, 1, 1, 1]
    assert uneven.transfer_s(0, 2, 1e9) == pytest.approx(1.001)
    assert uneven.transfer_s(2, 2, 1e9) == 0


def test_a_cluster_too_large_for_this_machine_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    networks.cluster([10, 10], networks.NVLINK, networks.ETHERNET_25G)
    for too_large in (
        lambda: networks.cluster([50, 50], networks.NVLINK, networks.ETHERNET_25G),
        lambda: networks.regions({"Ohio": 40, "Oregon": 60}),
    ):
        with refuses("100 devices", error=ConfigError):
            too_large()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: networks.preset("infinite"), ("infinite", "nvlink_25gbe")),
        (lambda: networks.preset("nvlink_25gbe", 0, 4), (0, 4)),
        (lambda: networks.preset("dtfm_case4", 8, 8), ("dtfm_case4",)),
        (lambda: networks.regions({"Mars": 2}), ("Mars", "Oregon")),
        (lambda: networks.cluster([4, 0], networks.NVLINK, networks.ETHERNET_25G), ([4, 0],)),
    ],
)
def test_bad_names_and_sizes_are_refused(call, named):
    with refuses(*named):
        call()
