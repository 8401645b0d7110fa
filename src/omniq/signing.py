"""Signs or encrypts the bytes of a record, so that only the holder of a key can change or read it.

    offset  0  0xc1, with which no MessagePack document begins
            1  the method: 1 signed, 2 encrypted
            2  the id of the key, 8 bytes
           10  signed:     HMAC-SHA256 of everything else (32 bytes), then the record
               encrypted:  a salt (32 bytes), then the output of AES-256-GCM

The kind of the record is part of the signed data, and so is what a document belongs to, such as the
id of a task: sealed bytes cannot be moved to another place. Each encrypted record has a separate key,
derived from its salt, so no key is ever used twice.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from omniq.clock import new_secret
from omniq.errors import KeyNeeded, SerializationError, SettingsError

if TYPE_CHECKING:
    from omniq.models import Task, TaskResult
    from omniq.serialization import Serializer

MIN_KEY_BYTES: Final = 16

Kind = Literal[b"T", b"R", b"C", b"P", b"S", b"D", b"H", b"O"]
TASK: Final[Kind] = b"T"
RESULT: Final[Kind] = b"R"
CHECKPOINT: Final[Kind] = b"C"
PROGRESS: Final[Kind] = b"P"
SCHEDULE: Final[Kind] = b"S"
DEAD_LETTER: Final[Kind] = b"D"
HOOK: Final[Kind] = b"H"
OUTPUT: Final[Kind] = b"O"

_DOCUMENTS = {
    CHECKPOINT: "checkpoint of task",
    PROGRESS: "progress of task",
    SCHEDULE: "schedule",
    HOOK: "pending hook of task",
    OUTPUT: "output of task",
}

_SIGNED, _ENCRYPTED = b"\xc1\x01", b"\xc1\x02"
_HEADER_SIZE, _SEAL_SIZE = 10, 32
_BLOCK_SIZE = 64
_PURPOSE = b"omniq "
"""Begins what a key is derived for."""

# A constant nonce is safe because no key is used for a second record.
_NONCE = bytes(12)


class Seal:
    """Signs with `signing_key`, or encrypts with `encryption_key` if there is one.

    Opens records sealed with either key or with one of `old_keys`, so that a key can be replaced
    while workers run. A record without a seal is refused.
    """

    def __init__(
        self,
        signing_key: str | bytes | None = None,
        *,
        encryption_key: str | bytes | None = None,
        old_keys: Sequence[str | bytes] = (),
    ) -> None:
        signing, encryption = _checked(signing_key), _checked(encryption_key)
        newest = signing if encryption is None else encryption
        if newest is None:
            raise SettingsError("a seal needs a signing key or an encryption key")
        self._cipher = _cipher() if encryption is not None else None
        method = _SIGNED if encryption is None else _ENCRYPTED
        self._header = method + _key_id(newest)
        self._signers: dict[bytes, _Signer] = {}
        self._key_makers: dict[bytes, _Signer] = {}
        older = [_checked(key) for key in old_keys]
        namers: dict[bytes, _Signer] = {}
        for key in (encryption, *older, signing):
            # A key may be given twice, such as the newest one among the old ones.
            if key is not None and key not in namers:
                self._signers[_SIGNED + _key_id(key)] = _Signer(_derived(key, b"sign"))
                self._key_makers[_ENCRYPTED + _key_id(key)] = _Signer(_derived(key, b"encrypt"))
                namers[key] = _Signer(_derived(key, b"unique"))
        self._all_namers = [*namers.values()]
        self._namers = [namer for key, namer in namers.items() if key in (encryption, *older)]

    @property
    def is_encrypting(self) -> bool:
        """Whether new records are encrypted, and not only signed."""
        return self._cipher is not None

    def unique_names(self, key: str) -> list[str]:
        """The names under which a task holds a unique key; its row has the first.

        In an encrypted store, a name is a hash that only the holder of a key can make. There is one for
        each old key too: a task that was enqueued with one of them holds the key as well.
        """
        hashes = _hashes(self._namers, key)
        return hashes if self.is_encrypting else [key, *hashes]

    def is_unique_name(self, name: str, key: str) -> bool:
        """Whether a task may hold the unique key under that name, whichever of the keys encrypted it."""
        return name == key or name in _hashes(self._all_namers, key)

    def close(self, kind: Kind, record: bytes, *belongs_to: str) -> bytes:
        """Return the record, sealed with the newest key. It opens only for the same `belongs_to`."""
        header = self._header
        context = header + kind + _packed(belongs_to)
        if self._cipher is None:
            return header + self._signers[header].sign(context, record) + record
        salt = new_secret().encode()
        cipher = self._cipher(self._key_makers[header].sign(_PURPOSE, salt))
        encrypted: bytes = cipher.encrypt(_NONCE, record, context)
        return header + salt + encrypted

    def open(self, kind: Kind, sealed: bytes, *belongs_to: str) -> bytes:
        """Return the sealed record. Raises `SerializationError` if no known key made this seal."""
        header, seal = sealed[:_HEADER_SIZE], sealed[_HEADER_SIZE : _HEADER_SIZE + _SEAL_SIZE]
        body = sealed[_HEADER_SIZE + _SEAL_SIZE :]
        context = header + kind + _packed(belongs_to)
        signer = self._signers.get(header)
        if signer is not None:
            if not hmac.compare_digest(seal, signer.sign(context, body)):
                raise _broken()
            return body
        key_maker = self._key_makers.get(header)
        if key_maker is None or len(seal) < _SEAL_SIZE:
            raise _broken()
        # An old record may be encrypted although new records are only signed.
        cipher = (self._cipher or _cipher())(key_maker.sign(_PURPOSE, seal))
        try:
            record: bytes = cipher.decrypt(_NONCE, body, context)
        except Exception as error:
            # The driver raises one error for a wrong tag and others for malformed data.
            raise _broken() from error
        return record


class _Signer:
    """HMAC-SHA256 with one key.

    Its two hashes each begin with a block that depends on the key alone. These are hashed once, which
    takes half the time of `hmac.digest`.
    """

    def __init__(self, key: bytes) -> None:
        block = key.ljust(_BLOCK_SIZE, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def sign(self, context: bytes, record: bytes) -> bytes:
        """The signature of the context and the record behind it."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(context)
        inner.update(record)
        outer.update(inner.digest())
        return outer.digest()


def _hashes(namers: Sequence[_Signer], key: str) -> list[str]:
    return [namer.sign(b"", key.encode()).hex() for namer in namers]


class SealedSerializer:
    """Seals the records of another serializer. Nothing is decoded before it is verified."""

    def __init__(self, inner: Serializer, seal: Seal) -> None:
        self.inner = inner
        self.seal = seal

    def encode_task(self, task: Task) -> bytes:
        return self.seal.close(TASK, self.inner.encode_task(task))

    def decode_task(self, data: bytes) -> Task:
        return self.inner.decode_task(self.seal.open(TASK, data))

    def encode_result(self, result: TaskResult) -> bytes:
        return self.seal.close(RESULT, self.inner.encode_result(result))

    def decode_result(self, data: bytes) -> TaskResult:
        return self.inner.decode_result(self.seal.open(RESULT, data))


def has_seal(data: bytes) -> bool:
    """Whether the bytes claim to be sealed. No record without a seal begins as these do."""
    return data.startswith((_SIGNED, _ENCRYPTED))


def is_sealed(serializer: Serializer) -> bool:
    """Whether the serializer signs or encrypts records, and refuses others."""
    return isinstance(serializer, SealedSerializer)


def seal_document(serializer: Serializer, kind: Kind, data: bytes, *belongs_to: str) -> bytes:
    """The document as it is stored: sealed as a whole if the serializer seals records."""
    if isinstance(serializer, SealedSerializer):
        return serializer.seal.close(kind, data, *belongs_to)
    return data


def open_document(serializer: Serializer, kind: Kind, data: bytes, *belongs_to: str) -> bytes:
    """Return what `seal_document` was given; `SerializationError` if it was not stored that way.

    `KeyNeeded` if it is sealed, and the serializer has no key.
    """
    if isinstance(serializer, SealedSerializer):
        return serializer.seal.open(kind, data, *belongs_to)
    if has_seal(data):
        raise KeyNeeded(f"{_DOCUMENTS[kind]} {belongs_to[0]}")
    return data


def unsealed(serializer: Serializer) -> Serializer:
    """The serializer of values inside a document that is sealed as a whole.

    A value in it must not have the seal of a task or a result: it could be moved there.
    """
    return serializer.inner if isinstance(serializer, SealedSerializer) else serializer


def _checked(key: str | bytes | None) -> bytes | None:
    if key is None:
        return None
    key = key.encode() if isinstance(key, str) else key
    if len(key) < MIN_KEY_BYTES:
        raise SettingsError(
            f"a signing key of at least {MIN_KEY_BYTES} bytes is needed, and so is an encryption "
            "key: use the same random secret in every process, such as `openssl rand -hex 32` makes"
        )
    return key


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + purpose, "sha256")


def _key_id(key: bytes) -> bytes:
    return _derived(key, b"key id")[:8]


def _packed(names: tuple[str, ...]) -> bytes:
    """The names, each after its length, so that no two lists of names give the same bytes."""
    if not names:
        return b""
    encoded = [name.encode() for name in names]
    return b"".join(len(name).to_bytes(4, "big") + name for name in encoded)


def _cipher() -> Callable[[bytes], Any]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise SettingsError(
            "encryption of payloads is an extra: pip install 'omniq[encryption]'"
        ) from error
    return AESGCM


def _broken() -> SerializationError:
    return SerializationError(
        "the signature is wrong: the record was changed, or was signed with an unknown key"
    )


def protection(serializer: object) -> str:
    """How a serializer protects its records: "open", "signed" or "encrypted"."""
    if not isinstance(serializer, SealedSerializer):
        return "open"
    return "encrypted" if serializer.seal.is_encrypting else "signed"
