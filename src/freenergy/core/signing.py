"""Who vouches for a run: an Ed25519 signature (RFC 8032) over the checksums of all its manifests.

    signed text = canonical JSON of {manifest or recipe: SHA-256 of its bytes}
    signature.json = the same table, the public key and the signature

A manifest holds the checksums of its files, so the signature is about every file of the run. Keys are those of OpenSSH
(``ssh-keygen -t ed25519``) or PEM (``openssl genpkey -algorithm ed25519``).
"""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from freenergy.core.checksums import RECIPE, manifests
from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, read_json, write_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature.json"


def sign(run: Path, key: Path) -> None:
    """Sign the run as it is now with the private key in a file."""
    private = _private(key)
    table = _table(run)
    raw = private.public_key().public_bytes_raw().hex()
    signature = private.sign(_canonical(table)).hex()
    write_json(run / SIGNATURE, {"files": table, "public_key": raw, "signature": signature})


def check_signature(run: Path, key: Path) -> None:
    """Raise ``UserError`` unless the run is what the owner of the public key in a file has signed."""
    public = _public(key)
    invalid: Any = import_module("cryptography.exceptions").InvalidSignature
    if not (run / SIGNATURE).is_file():
        raise UserError(f"{run} is not signed: ask its author to `freenergy verify RUN --sign KEY`")
    record = read_json(run / SIGNATURE)
    try:
        public.verify(bytes.fromhex(record["signature"]), _canonical(record["files"]))
    except (invalid, ValueError, TypeError):
        raise UserError(f"the signature of {run} is not by the key in {key}: do not trust this run") from None
    if record["files"] != _table(run):
        raise UserError(f"{run} has changed since it was signed: do not trust it, or ask its author to sign it again")


def _table(run: Path) -> dict[str, str]:
    paths = [run / RECIPE, *manifests(run)]
    return {str(path.relative_to(run)): file_hash(path) for path in paths if path.is_file()}


def _canonical(table: object) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def _private(path: Path) -> "Ed25519PrivateKey":
    ssh, pem, kinds = _serialization().load_ssh_private_key, _serialization().load_pem_private_key, _kinds()
    content = _content(path)
    for load in (ssh, pem):
        try:
            found: Any = load(content, password=None)
        except (ValueError, TypeError):  # of the other format, or with a passphrase
            continue
        if isinstance(found, kinds.Ed25519PrivateKey):
            return cast("Ed25519PrivateKey", found)
    raise UserError(f"{path} is not an Ed25519 private key without a passphrase: make one with ssh-keygen -t ed25519")


def _public(path: Path) -> "Ed25519PublicKey":
    ssh, pem, kinds = _serialization().load_ssh_public_key, _serialization().load_pem_public_key, _kinds()
    content = _content(path)
    for load in (ssh, pem):
        try:
            found: Any = load(content)
        except ValueError:
            continue
        if isinstance(found, kinds.Ed25519PublicKey):
            return cast("Ed25519PublicKey", found)
    raise UserError(f"{path} is not an Ed25519 public key: give the file that ends in .pub")


def _serialization() -> Any:
    try:
        return import_module("cryptography.hazmat.primitives.serialization")
    except ModuleNotFoundError:
        raise UserError("signatures need cryptography: pip install 'freenergy[sign]'") from None


def _kinds() -> Any:
    return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the key {path} cannot be read ({error.strerror}): check the path") from None
