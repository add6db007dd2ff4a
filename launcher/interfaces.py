"""Which of a node's network interfaces its ranks use: gloo and NCCL take a name, all others an address."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Interface:
    """One interface of a node with its IPv4 and IPv6 addresses, without zones."""

    name: str
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


@dataclass(frozen=True)
class Endpoint:
    """What a rank binds to: an interface and one address of it."""

    interface: str
    address: str


class NoInterface(ValueError):
    """A node has no interface as wanted; the message says what was looked for and what there is."""


def list_interfaces() -> tuple[Interface, ...]:
    """Interfaces of this node that are up, by name."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(name, tuple(a.address.partition("%")[0] for a in addresses if a.family in families))
        for name, addresses in sorted(psutil.net_if_addrs().items())
        if name in up
    )


def choose(interfaces: Sequence[Interface], wanted: str | None, node_ip: str) -> Endpoint:
    """The interface for a rank on a node that Ray knows as `node_ip`.

    wanted: a name, or an address range in CIDR form of which the node has an address; None: the one with `node_ip`.
    Of several addresses that of the wanted range comes first, then `node_ip`, then IPv4. Raises NoInterface.
    """
    if wanted is None:
        fits, tried = _with_address(interfaces, node_ip), f"one with its Ray address {node_ip}"
    elif "/" in wanted:
        network = ip_network(wanted)
        inside = [(i, a) for i in interfaces for a in i.addresses if ip_address(a) in network]
        fits, tried = [Endpoint(i.name, a) for i, a in inside], f"one with an address in {wanted}"
    else:
        named = [i for i in interfaces if i.name == wanted]
        fits = _with_address(named, node_ip) or [Endpoint(i.name, a) for i in named for a in _usable(i)]
        tried = f"one named {wanted} with an address"
    if not fits:
        raise NoInterface(f"no interface for the ranks: tried {tried}; there are {', '.join(map(str, interfaces))}")
    return fits[0]


def choose_all(nodes: Mapping[str, Sequence[Interface]], wanted: str | None) -> dict[str, Endpoint]:
    """For a gang on several nodes, by Ray address. Raises NoInterface with a part for every node that has none."""
    found, faults = {}, []
    for node_ip, interfaces in nodes.items():
        try:
            found[node_ip] = choose(interfaces, wanted, node_ip)
        except NoInterface as error:
            faults.append(f"node {node_ip}: {error}")
    if faults:
        raise NoInterface(f"{'; '.join(faults)}; set ranks.interface to a name, or to a range like 10.1.0.0/16")
    return found


def loopback(interfaces: Sequence[Interface]) -> Endpoint:
    """For a gang on one node."""
    return next(iter(_with_address(interfaces, LOOPBACK)), Endpoint("lo", LOOPBACK))


def _with_address(interfaces: Sequence[Interface], address: str) -> list[Endpoint]:
    return [Endpoint(i.name, address) for i in interfaces if address in i.addresses]


def _usable(interface: Interface) -> list[str]:
    """IPv4 before IPv6; an address that is good on its own link only cannot be bound to without its zone."""
    parsed = [ip_address(address) for address in interface.addresses]
    return [str(a) for a in sorted(parsed, key=lambda a: a.version) if not a.is_link_local]
