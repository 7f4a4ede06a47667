"""The Hugging Face hub: whether a name may be there, and whether the hub answers."""

from __future__ import annotations

from typing import Any

_SECONDS = (1.5, 10.0, 10.0, 10.0)
"""The timeouts, in seconds, to connect, to read, to write and to wait for a free connection."""


def check_hub_name(name: str) -> None:
    """Raise OSError if ``name`` is not a possible name on the hub."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        raise OSError("no such folder, and not a valid name on the Hugging Face hub, such as owner/model") from None


def hub_failure(name: str) -> str:
    """Why the hub does not answer a request for ``name``; empty if it answers, or in offline mode.

    The hub's own client repeats each request for 20 seconds before it fails. This function makes a single request in
    the same way, so the user's proxies and hub address apply.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        get_session().head(f"{constants.ENDPOINT}/{name}/resolve/main/config.json", timeout=_SECONDS)
    except Exception as error:  # the types belong to the HTTP library, which depends on the release of the hub's client
        return str(error) or type(error).__name__
    return ""


def hub_arguments(name: str) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a name on the hub: local files only, if the hub does not answer."""
    return {"local_files_only": True} if hub_failure(name) else {}
