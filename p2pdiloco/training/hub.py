"""Uploads of exports to the Hugging Face hub, through huggingface_hub and by its rules: its token, its endpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from p2pdiloco.training.huggingface import EXTRA, ArchitectureError


def check_hub(repository: str) -> None:
    """Check, before anything is written, that an upload can begin. Call it before transformers is imported, which is
    otherwise offline.

    Raises:
        ArchitectureError: huggingface_hub or its token is missing, it is offline, or ``repository`` is no valid name.
    """
    if os.environ.setdefault("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise ArchitectureError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or leave --push-to-hub out")
    hub = _hub()
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ArchitectureError(f"--push-to-hub {repository!r}: {error}") from error
    if "/" not in repository:
        raise ArchitectureError(f"--push-to-hub {repository!r} must be OWNER/NAME")
    if hub.get_token() is None:
        raise ArchitectureError("--push-to-hub needs a token with write access: run hf auth login, or set HF_TOKEN")


def push(folder: Path, files: list[str], repository: str, *, is_private: bool) -> str:
    """Create the repository if needed, and upload these files of an export. Return its address.

    Raises:
        ArchitectureError: the hub refuses, or cannot be reached. The export remains.
    """
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(repository, private=is_private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=files,
            commit_message="Export of a p2pdiloco run",
        )
    except Exception as error:  # the library and its transport raise many types of errors
        raise ArchitectureError(
            f"{folder} is written, but it cannot be pushed to {repository} ({error}): try again with "
            f"hf upload {repository} {folder}"
        ) from error
    return str(address)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ArchitectureError(f"--push-to-hub needs huggingface_hub: {EXTRA}") from error
    return huggingface_hub
