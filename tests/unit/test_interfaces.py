"""Which interface a rank uses, and what is said when there is none."""

import pytest

from launcher.interfaces import Endpoint, Interface, NoInterface, choose, choose_all, list_interfaces, loopback

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("192.168.7.5", "fe80::1"))
IB0 = Interface("ib0", ("fe80::2", "fd00::5", "10.1.3.5", "10.1.3.6"))
NODE = (ETH0, IB0, LO)


@pytest.mark.parametrize(
    ("wanted", "node_ip", "endpoint"),
    [
        (None, "192.168.7.5", Endpoint("eth0", "192.168.7.5")),
        (None, "fd00::5", Endpoint("ib0", "fd00::5")),
        ("ib0", "192.168.7.5", Endpoint("ib0", "10.1.3.5")),
        ("ib0", "10.1.3.6", Endpoint("ib0", "10.1.3.6")),
        ("10.1.0.0/16", "192.168.7.5", Endpoint("ib0", "10.1.3.5")),
        ("10.1.3.6/32", "192.168.7.5", Endpoint("ib0", "10.1.3.6")),
        ("fd00::/8", "192.168.7.5", Endpoint("ib0", "fd00::5")),
    ],
)
def test_the_interface_of_a_node(wanted: str | None, node_ip: str, endpoint: Endpoint) -> None:
    assert choose(NODE, wanted, node_ip) == endpoint


@pytest.mark.parametrize(
    ("wanted", "tried"),
    [
        (None, "tried one with its Ray address 10.9.9.9"),
        ("ib1", "tried one named ib1 with an address"),
        ("10.2.0.0/16", "tried one with an address in 10.2.0.0/16"),
    ],
)
def test_what_was_tried_and_what_there_is(wanted: str | None, tried: str) -> None:
    with pytest.raises(NoInterface) as caught:
        choose(NODE, wanted, "10.9.9.9")
    assert tried in str(caught.value)
    assert "there are eth0 (192.168.7.5, fe80::1), ib0 (" in str(caught.value)


def test_an_interface_without_a_usable_address_is_none() -> None:
    down = Interface("ib0", ("fe80::2",))
    with pytest.raises(NoInterface, match=r"ib0 \(fe80::2\)"):
        choose((ETH0, down), "ib0", "192.168.7.5")


def test_every_node_that_lacks_it_is_named() -> None:
    nodes = {"192.168.7.5": NODE, "192.168.7.6": (LO,), "192.168.7.7": (ETH0, LO)}
    with pytest.raises(NoInterface) as caught:
        choose_all(nodes, "10.1.0.0/16")
    words = str(caught.value)
    assert "node 192.168.7.6: " in words and "node 192.168.7.7: " in words and "node 192.168.7.5: " not in words
    assert words.endswith("set ranks.interface to a name, or to a range like 10.1.0.0/16")
    assert choose_all({"192.168.7.5": NODE}, "ib0") == {"192.168.7.5": Endpoint("ib0", "10.1.3.5")}


def test_this_machine_has_a_loopback() -> None:
    here = list_interfaces()
    assert loopback(here).address == "127.0.0.1"
    assert choose(here, None, "127.0.0.1") == loopback(here)
