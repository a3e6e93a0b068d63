"""Which network addresses a client's URL may lead to: public unicast ones, nothing else.

``ipaddress.is_global`` alone is not enough: it calls multicast, NAT64 and mapped loopback global.
So the special-purpose registries are spelled out, and addresses that carry another address inside
are judged by both.
"""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DENIED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, cloud metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",  # Azure's host
        "::/96",  # unspecified, loopback, IPv4-compatible
        "::ffff:0:0:0/96",  # IPv4-translated
        "64:ff9b:1::/48",  # local NAT64
        "100::/64",
        "2001::/23",  # Teredo, ORCHID and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(text: str, *, denied: Sequence[Network] = (), exempt: Sequence[Network] = ()) -> bool:
    """Whether an address literal may be dialled. ``denied`` adds networks to the built-in list,
    ``exempt`` overrules both. Anything that is not a plain address is refused."""
    if "%" in text:
        return False  # a scope
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        return False
    address = _unwrapped(address)
    if _is_in(address, exempt):
        return True
    return address.is_global and not _is_in(address, _DENIED) and not _is_in(address, denied)


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside a mapped or NAT64 one: that is where packets end up."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)
