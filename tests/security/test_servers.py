"""Connections to servers need few rights, and verify the certificate of the server."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from omniq.errors import StorageError, StorageRefused
from omniq.storage import open_storage
from omniq.testing.builders import a_task
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import RawRedisStore, fill, use

# The rights from docs/guides/security.md: none beyond the keys of the store.
REDIS_RIGHTS = (
    "resetchannels &{%s}:* ~{%s}:* +@read +@write +@scripting +@connection +@pubsub -@dangerous "
    "+info +time +client|setname"
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S23")
async def test_a_redis_user_with_access_only_to_the_keys_of_the_store_suffices(redis_url):
    raw_store = raw_store_of(redis_url)
    assert isinstance(raw_store, RawRedisStore)
    rights = REDIS_RIGHTS.replace("%s", raw_store.prefix)
    raw_store.client.execute_command(
        "ACL", "SETUSER", raw_store.prefix, "reset", "on", ">pw", *rights.split()
    )
    parts = urlsplit(redis_url)
    url = parts._replace(netloc=f"{raw_store.prefix}:pw@{parts.hostname}:{parts.port}").geturl()
    try:
        async with open_storage(url) as storage:
            await fill(storage)
            refused = await use(storage)
        with pytest.raises(StorageRefused):
            async with open_storage(
                url.replace(f"prefix={raw_store.prefix}", "prefix=another")
            ) as other:
                await other.enqueue(a_task())
    finally:
        raw_store.client.execute_command("ACL", "DELUSER", raw_store.prefix)
        raw_store.close()

    assert refused == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S23")
async def test_a_postgresql_user_with_access_only_to_the_schema_of_the_store_suffices(
    postgres_database,
):
    role = urlsplit(postgres_database).path[1:]
    with psycopg.connect(postgres_database, autocommit=True) as admin:
        for sql in (
            f"CREATE ROLE {role} LOGIN PASSWORD 'pw' NOSUPERUSER NOCREATEDB NOCREATEROLE",
            f"REVOKE ALL ON SCHEMA public FROM {role}",
            f"CREATE SCHEMA tasks AUTHORIZATION {role}",
        ):
            admin.execute(sql.encode())
    parts = urlsplit(postgres_database)
    url = parts._replace(netloc=f"{role}:pw@{parts.hostname}:{parts.port}").geturl()
    try:
        async with open_storage(f"{url}?schema=tasks") as storage:
            await fill(storage)
            refused = await use(storage)
        with pytest.raises(StorageRefused):
            async with open_storage(f"{url}?schema=another"):
                pass
    finally:
        with psycopg.connect(postgres_database, autocommit=True) as admin:
            admin.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}".encode())

    assert refused == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "other.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("other.example")]), False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


class Impostor:
    """Accepts TLS connections with that certificate, and records what it receives."""

    def __init__(self, certificate: Path, *, asks_first: bool) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._asks_first = asks_first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.callers = 0
        self.received = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            self.callers += 1
            try:
                with caller:
                    if self._asks_first:
                        # PostgreSQL: the client asks whether the server supports TLS.
                        caller.recv(8)
                        caller.sendall(b"S")
                    with self._context.wrap_socket(caller, server_side=True) as secured:
                        self.received += secured.recv(1000)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def impostor(request: pytest.FixtureRequest, certificate: Path) -> Iterator[Impostor]:
    server = Impostor(certificate, asks_first=request.param)
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S24")
@pytest.mark.fault("F50")
@pytest.mark.parametrize(
    ("impostor", "url"),
    [
        (False, "rediss://me:canary@127.0.0.1:{port}/0"),
        (False, "rediss://me:canary@localhost:{port}/0"),
        (
            True,
            "postgresql://me:canary@127.0.0.1:{port}/db?sslmode=verify-full&sslrootcert={other}",
        ),
        (True, "postgresql://me:canary@localhost:{port}/db?sslmode=verify-ca&sslrootcert={other}"),
    ],
    indirect=["impostor"],
)
async def test_a_server_with_an_untrusted_certificate_receives_nothing(impostor, url, tmp_path):
    other = make_certificate(tmp_path)
    with pytest.raises(StorageError) as refused:
        async with open_storage(url.format(port=impostor.port, other=other)):
            pass

    assert impostor.callers > 0
    assert b"canary" not in impostor.received
    assert impostor.received == b""
    assert "canary" not in str(refused.value)


@pytest.mark.timeout(120)
@pytest.mark.security("S24")
@pytest.mark.fault("F50")
@pytest.mark.parametrize(
    ("impostor", "url"),
    [
        (False, "rediss://me:canary@localhost:{port}/0?ssl_ca_certs={trusted}"),
        (
            True,
            "postgresql://me:canary@localhost:{port}/db?sslmode=verify-full&sslrootcert={trusted}",
        ),
    ],
    indirect=["impostor"],
)
async def test_a_server_with_a_trusted_certificate_for_another_name_is_refused(
    impostor, url, certificate
):
    """A worker ends, instead of trying again without end."""
    with pytest.raises(StorageRefused, match="certificate"):
        async with open_storage(url.format(port=impostor.port, trusted=certificate)):
            pass

    assert impostor.callers > 0
    assert impostor.received == b""


@asynccontextmanager
async def behind_tls(redis_url: str, certificate: Path) -> AsyncIterator[str]:
    """The server's URL behind TLS with that certificate, for clients that have one too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    parts = urlsplit(redis_url)
    served: list[asyncio.Future[tuple[None, None]]] = []

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()
        with suppress(OSError):
            await target.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        served.append(asyncio.gather(pass_on(reader, back), pass_on(there, writer)))

    # A closed connection sends no TLS goodbye that would have to be awaited.
    async with await asyncio.start_server(
        serve, "127.0.0.1", 0, ssl=context, ssl_shutdown_timeout=0.1
    ) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield parts._replace(scheme="rediss", netloc=f":{parts.password}@127.0.0.1:{port}").geturl()
        await asyncio.gather(*served)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S24")
async def test_the_connection_to_a_redis_server_with_a_trusted_certificate_is_encrypted(
    redis_url, certificate
):
    async with behind_tls(redis_url, certificate) as url:
        theirs = f"{url}&ssl_ca_certs={certificate}"
        ours = f"{theirs}&ssl_certfile={certificate}"
        async with open_storage(f"{ours}&ssl_check_hostname=false") as storage:
            await fill(storage)
            refused = await use(storage)
        for unfit in (
            ours,  # a certificate of another name than 127.0.0.1
            f"{theirs}&ssl_check_hostname=false",  # without a client certificate
        ):
            with pytest.raises(StorageError):
                async with open_storage(unfit):
                    pass

    assert refused == 0
