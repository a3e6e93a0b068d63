"""URL syntax and addresses: every disguise of an internal target is seen through."""

import ipaddress

import pytest

from gateway.media.address import is_public
from gateway.media.url import parse_url, resolve_location
from mimo.errors import InvalidRequest, Reason


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM:443/a?b=c#d", "https://example.com/a?b=c"),
        ("https://example.com.:8443/ä", "https://example.com:8443/%C3%A4"),
        ("https://example.com?x=1", "https://example.com/?x=1"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("https://[2606:4700::1111]/x", "https://[2606:4700::1111]/x"),
        ("http://93.184.215.14:80/%41", "http://93.184.215.14/%41"),
    ],
)
def test_one_spelling_for_every_url(url: str, normal: str) -> None:
    assert str(parse_url(url)) == normal


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com",
        "ftp://example.com/x",
        "file:///etc/passwd",
        "s3://bucket/key",
        "blob:https://example.com/1",
        "gopher://127.0.0.1/",
        "https://",
        "https:///path",
        "https://user@example.com/",
        "https://user:secret@example.com/",
        "https://example.com\\@evil.example/",
        "https://exa mple.com/",
        "https://exa\tmple.com/",
        "https://example.com/\nx",
        "https://example.com/%00",
        "https://example.com/\ud800",
        "https://example.com:0/",
        "https://example.com:65536/",
        "https://example.com:99999/",
        "https://example.com:80:80/",
        "https://example.com:8o/",
        "https://[::1%25eth0]/",
        "https://[::1/",
        "https://::1/",
        "https://[example.com]/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://017700000001/",
        "https://127.1/",
        "https://0/",
        "https://1.2.3/",
        "https://127.0.0.01/",
        "https://1.2.3.4.5/",
        "https://-bad.example/",
        "https://a..example/",
        "https://" + "a" * 64 + ".example/",
        "https://ex_ample.com/",
        "https://example.com/" + "x" * 2048,
    ],
)
def test_doubtful_urls_are_invalid(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_url(url)
    assert caught.value.reason == Reason.URL_INVALID


@pytest.mark.parametrize(
    "url",
    [
        "https://localhost/",
        "https://LOCALHOST./",
        "https://redis/",
        "https://printer.local/",
        "https://metadata.google.internal/",
        "https://store.default.svc/",
        "https://store.default.svc.cluster.local/",
        "https://hidden.onion/",
    ],
)
def test_names_of_local_networks_are_blocked(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_url(url)
    assert caught.value.reason == Reason.URL_BLOCKED


def test_unicode_digits_are_an_address() -> None:
    for url in ("https://①②⑦.⓪.⓪.①/", "https://１２７.0.0.1/", "https://127。0。0。1/"):
        parsed = parse_url(url)
        assert parsed.host == "127.0.0.1"
        assert parsed.is_literal
        assert not is_public(parsed.host)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b", "https://example.com/b"),
        ("b?c", "https://example.com/dir/b?c"),
        ("//other.example/", "https://other.example/"),
        ("http://other.example/", "http://other.example/"),
    ],
)
def test_redirects_are_resolved(location: str, target: str) -> None:
    assert str(resolve_location(parse_url("https://example.com/dir/a"), location)) == target


@pytest.mark.parametrize(
    "location", ["ht\ttps://evil.example", "file:///etc/passwd", "https://a@b.c"]
)
def test_redirects_are_held_to_the_same_rules(location: str) -> None:
    with pytest.raises(InvalidRequest):
        resolve_location(parse_url("https://example.com/"), location)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254"),
        *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1"),
        *("192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.1.1", "192.175.48.1"),
        *("198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "168.63.129.16"),
        *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "100::1", "2001::1"),
        *("2001:db8::1", "2002:7f00:1::1", "2620:4f:8000::1", "3fff::1", "5f00::1"),
        *("fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
        *("", "localhost", "1.2.3", "0x7f000001"),
    ],
)
def test_special_addresses_are_denied(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


def test_networks_of_the_deployment() -> None:
    network = ipaddress.ip_network("93.184.0.0/16")
    assert not is_public("93.184.215.14", denied=[network])
    assert not is_public("::ffff:93.184.215.14", denied=[network])
    loopback = ipaddress.ip_network("127.0.0.0/8")
    assert is_public("127.0.0.1", exempt=[loopback])
    assert not is_public("169.254.169.254", exempt=[loopback])
