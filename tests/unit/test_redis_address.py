"""The URL of a Redis server is parsed, and refused before a connection is opened."""

from __future__ import annotations

import ssl
import traceback

import pytest

from omniq.errors import SettingsError
from omniq.storage.redis.address import Address, Node, parse


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {}),
        ("redis://host", {"host": "host"}),
        ("redis://host:7000/", {"host": "host", "port": 7000}),
        ("redis://host/3", {"host": "host", "database": 3}),
        ("redis://host/3?db=4", {"host": "host", "database": 4}),
        ("redis://:p%40ss@host", {"host": "host", "password": "p@ss"}),
        ("redis://me@host", {"host": "host", "username": "me"}),
        (
            "redis://a%2Fb:c@[::1]/1",
            {"host": "::1", "username": "a/b", "password": "c", "database": 1},
        ),
        (
            "redis://h?username=me&password=p%40ss",
            {"host": "h", "username": "me", "password": "p@ss"},
        ),
        ("valkey://host?client_name=shop", {"host": "host", "client_name": "shop"}),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "database": 2}),
        ("unix://:pass@/run/a%20b.sock", {"path": "/run/a b.sock", "password": "pass"}),
    ],
)
def test_a_url_is_parsed(url, expected):
    assert parse(url) == Address(**expected)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "redis+sentinel://me:pw@a,b:7000/shop/2?sentinel_password=s",
            {
                "kind": "sentinel",
                "nodes": (Node("a", 26379), Node("b", 7000)),
                "service": "shop",
                "database": 2,
                "username": "me",
                "password": "pw",
                "sentinel_password": "s",
            },
        ),
        (
            "valkey+cluster://:p%40@a:1,[::1]:2",
            {"kind": "cluster", "nodes": (Node("a", 1), Node("::1", 2)), "password": "p@"},
        ),
    ],
)
def test_a_url_of_several_servers_is_parsed(url, expected):
    assert parse(url) == Address(**{"host": "", "port": 0, **expected})


def test_the_password_is_read_from_its_file_each_time(tmp_path):
    file = tmp_path / "password"
    file.write_text("first\n")
    address = parse(f"redis://me@host/0?password_file={file}")
    first = address.current_password()
    file.write_text("second")

    assert (first, address.current_password()) == ("first", "second")
    assert "first" not in repr(address)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
@pytest.mark.parametrize(
    ("options", "verify_mode", "check_hostname"),
    [
        ("", ssl.CERT_REQUIRED, True),
        ("?ssl_check_hostname=false", ssl.CERT_REQUIRED, False),
        ("?ssl_cert_reqs=optional", ssl.CERT_OPTIONAL, True),
        ("?ssl_cert_reqs=none", ssl.CERT_NONE, False),
        ("?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=no", ssl.CERT_NONE, False),
    ],
)
def test_the_servers_certificate_is_verified_unless_disabled(
    scheme, options, verify_mode, check_hostname
):
    tls = parse(f"{scheme}://host/0{options}").tls

    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (verify_mode, check_hostname)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "unknown kind 'http'"),
        ("redis://host/first", "expected a number as the database"),
        ("redis://host/-1", "expected a number as the database"),
        ("redis://host:port", "cannot be read; is the port a number"),
        ("redis://host:70000", "cannot be read; is the port a number"),
        ("rediss://host?ssl_keyfile=key.pem", "ssl_certfile"),
        ("unix://", "names no socket"),
        ("redis://h1,h2/0", r"names several servers: write redis\+sentinel://"),
        ("redis://h?sentinel=x", "unknown option 'sentinel'"),
        ("redis://h?sentinel_password=x", "unknown option; known"),
        ("redis+sentinel://h1,h2", "names no service"),
        ("redis+sentinel://h1,h2:x/shop", "cannot be read; is the port a number"),
        ("redis+cluster://h1,h2/3", "only database 0"),
        ("redis://h?password_file=/not/there", "No such file"),
        ("redis://:pw@h?password_file=/not/there", "give one of them"),
        ("redis://host?max_connections=4", "unknown option 'max_connections'; known: db"),
        ("redis://host?ssl_ca_certs=x", "unknown option 'ssl_ca_certs'; known: db"),
        ("rediss://host?ssl_cert_reqs=maybe", "none, optional or required"),
        ("rediss://host?ssl_check_hostname=maybe", "true or false"),
        ("rediss://host?ssl_ca_certs=/not/there", "No such file"),
        ("rediss://host?ssl_certfile=/not/there", "No such file"),
    ],
)
def test_an_invalid_url_is_refused(url, message):
    with pytest.raises(SettingsError, match=message):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:canary@host/0?password=canary&nothing=1",
        "redis://:canary/x@host",
        "redis://:123/canary@host/0",
        "redis://:123#canary@host/0",
        "redis://:canary#x@host",
        "redis://:x?canary@host",
        "redis://:123?canary@host",
        "redis://:canary\uff0fx@host",
    ],
)
def test_the_error_about_a_url_does_not_show_the_password(url):
    with pytest.raises(SettingsError) as refused:
        parse(url)

    assert "canary" not in "".join(traceback.format_exception(refused.value)[-1:])
    assert refused.value.__suppress_context__
