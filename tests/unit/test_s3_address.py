"""The URL of a store on S3 is parsed, and refused before a request is sent."""

from __future__ import annotations

import pytest

from omniq.errors import SettingsError
from omniq.storage.s3.address import Address, parse


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/jobs", Address(bucket="bucket", prefix="jobs")),
        ("s3://my.bucket-1/a/b.c/", Address(bucket="my.bucket-1", prefix="a/b.c")),
        (
            "s3://bucket/jobs?region=eu-west-1&endpoint=https://s3.example.com:9000",
            Address(
                bucket="bucket",
                prefix="jobs",
                region="eu-west-1",
                endpoint="https://s3.example.com:9000",
            ),
        ),
    ],
)
def test_a_url_is_parsed(url, expected):
    assert parse(url) == expected


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://", "names no bucket; write s3://bucket/prefix"),
        ("s3:///jobs", "names no bucket"),
        ("s3://bucket", "names no prefix; write s3://bucket/omniq"),
        ("s3://bucket/", "names no prefix"),
        ("s3://Bucket/jobs", "expected 3 to 63 lower-case letters"),
        ("s3://b/jobs", "expected 3 to 63"),
        ("s3://bucket/a//b", "prefix 'a//b'"),
        ("s3://bucket/../b", "prefix"),
        ("s3://bucket/a b", "prefix 'a b'"),
        (f"s3://bucket/{'x' * 201}", "up to 200"),
        ("s3://bucket/jobs?regoin=eu", "unknown option 'regoin'; known: endpoint, region"),
        ("s3://key:secret@bucket/jobs", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/jobs?secret_access_key=hidden", "credentials do not belong in the URL"),
        ("s3://bucket/jobs?endpoint=example.com:9000", "endpoint: expected an address"),
        ("s3://bucket/jobs?endpoint=http://me:hidden@host", "endpoint: expected an address"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url, advice):
    with pytest.raises(SettingsError) as raised:
        parse(url)

    assert advice in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "secret@" not in str(raised.value)
