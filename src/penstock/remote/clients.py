"""The client of `obstore` for a URL, with its timeouts and credentials.

Credentials come from the environment, as for other tools: `AWS_ACCESS_KEY_ID` and the like,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`, the
token of the Hugging Face Hub. If boto3 is installed, the profiles in `~/.aws` are used too. A user
and a password in an `https://` URL are sent to its host only.
"""

import base64
import importlib.util
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock import __version__
from penstock.errors import MissingExtraError, StoreError
from penstock.paths import REMOTE_SCHEMES, redacted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AGENT = f"penstock/{__version__}"


def make_client(url: str, seconds: float, retries: int) -> "ObjectStore":
    """Return the client for all files below `url`.

    Args:
        url: The prefix of the files.
        seconds: The deadline of one call. A request ends within a quarter of it.
        retries: How often the client itself repeats a request that failed.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreError: the URL is not one that penstock can read.
    """
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise MissingExtraError(
            f"{redacted(url)} needs obstore, which is not installed.\n"
            'Install it with: pip install "penstock[remote]"'
        ) from None
    parts = urlsplit(url)
    options: Any = _client_options(seconds, parts.scheme)
    retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds / 4)}
    try:
        if parts.scheme == "hf":
            url, options["default_headers"] = _hub_address(url)
            return HTTPStore.from_url(url, client_options=options, retry_config=retry)
        if parts.scheme in ("http", "https"):
            host = parts.netloc.rpartition("@")[2]
            if parts.username is not None:
                # Sent as a header: obstore would repeat a password of the URL in its errors, and
                # not use it.
                pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
                header = f"Basic {base64.b64encode(pair).decode()}"
                options["default_headers"] = {"Authorization": header}
            bare = urlunsplit(parts._replace(netloc=host))
            return HTTPStore.from_url(bare, client_options=options, retry_config=retry)
        more: Any = {}
        if parts.scheme == "s3" and _has_profiles_only():
            from obstore.auth.boto3 import Boto3CredentialProvider

            more["credential_provider"] = Boto3CredentialProvider()
        return from_url(url, client_options=options, retry_config=retry, **more)
    except (ImportError, MissingExtraError, StoreError):
        raise
    except Exception as error:  # noqa: BLE001  (of obstore and botocore, by scheme)
        from penstock.remote.failures import reason_of

        raise StoreError(f"{redacted(url)} cannot be opened: {reason_of(error)}.") from None


def check_url(url: str) -> None:
    """Raise a StoreError if `url` is not the URL of a remote store."""
    parts = urlsplit(url)
    if parts.scheme not in REMOTE_SCHEMES or not parts.netloc:
        known = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
        raise StoreError(
            f"{redacted(url)!r} is not the URL of a remote store; those begin with {known}, "
            "followed by a host or a bucket."
        )


def _client_options(seconds: float, scheme: str) -> dict[str, object]:
    """The timeouts of one request, so that four requests fit into the deadline."""
    # Without encryption only where the user asks for it: then a redirect from https to http is an
    # error.
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if scheme == "s3" else ""
    if scheme == "hf":
        endpoint = os.environ.get("HF_ENDPOINT", "")
    return {
        "timeout": timedelta(seconds=seconds / 4),
        # A body that stalls is found before the time of the request is over.
        "read_timeout": timedelta(seconds=min(15.0, seconds / 8)),
        "connect_timeout": timedelta(seconds=min(10.0, seconds / 8)),
        "allow_http": scheme == "http" or endpoint.startswith("http://"),
        "user_agent": _AGENT,
    }


def _has_profiles_only() -> bool:
    """Whether keys of S3 are not in the environment, and boto3 can look for them elsewhere."""
    named = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    return not any(map(os.environ.get, named)) and importlib.util.find_spec("boto3") is not None


def _hub_address(url: str) -> tuple[str, dict[str, str]]:
    """The https URL of a prefix on the Hugging Face Hub, and the headers of its requests.

    `hf://datasets/OWNER/NAME[@REVISION]/PREFIX`, as `huggingface_hub` writes it.
    """
    from huggingface_hub import get_token, hf_hub_url

    kind, *rest = url.removeprefix("hf://").strip("/").split("/")
    if kind not in ("datasets", "models") or len(rest) < 2:
        raise StoreError(
            f"{redacted(url)!r} does not name a repository of the Hugging Face Hub. Write "
            "hf://datasets/OWNER/NAME/PREFIX, with NAME@REVISION for another revision than main."
        )
    name, _, revision = rest[1].partition("@")
    # The name of a file is part of the URL, so one without a name needs a place for it.
    address = hf_hub_url(
        f"{rest[0]}/{name}",
        "/".join([*rest[2:], "x"]),
        repo_type=kind.removesuffix("s"),
        revision=revision or None,
        endpoint=os.environ.get("HF_ENDPOINT") or None,
    )
    # Not `build_hf_headers`, which asks the Hub for a list of agents first. The header is not sent
    # to the host that a redirect leads to.
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return address.removesuffix("/x"), headers
