"""Weights from the Hugging Face hub, or within seconds the reason why not.

huggingface_hub's own downloads retry for most of a minute where nothing answers, so the hub is asked one short
question first. HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which reads them when it
is imported.
"""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled

from normscope.errors import ModelError
from normscope.models import answers

logger = logging.getLogger(__name__)


def fetch(repo: str, filename: str) -> str:
    """Bring ``filename`` of ``repo`` into huggingface_hub's cache and return the commit it belongs to.

    Where the hub does not answer, the copy that is in the cache is taken, and a warning says so.

    Raises:
        ModelError: if it is neither on the hub nor in the cache.
    """
    cached = try_to_load_from_cache(repo, filename)
    failure = _ask_for(repo, filename)
    if failure is None:
        try:
            path = hf_hub_download(repo, filename)
        except Exception as error:  # of huggingface_hub, of its HTTP library, of the disk
            raise ModelError(
                f"The download of {filename} from {repo} broke off: {answers.first_line(error)}. {answers.ways_on()}"
            ) from error
    elif isinstance(cached, str):
        path = cached
        if not isinstance(failure, OfflineModeIsEnabled):
            logger.warning("%s is taken from the cache: %s.", repo, reason(failure, filename))
    else:
        raise ModelError(
            f"The weights of {repo} cannot be had: {reason(failure, filename)}. {answers.ways_on()}"
        ) from failure
    return Path(path).parents[filename.count("/")].name  # …/snapshots/<commit>/<filename>


def _ask_for(repo: str, filename: str) -> Exception | None:
    """Ask the hub for the file's metadata; return what went wrong."""

    def question() -> None:
        metadata = get_hf_file_metadata(hf_hub_url(repo, filename), timeout=answers.DEADLINE)
        if not metadata.commit_hash:
            raise NotAHubError

    return answers.ask(question)


class NotAHubError(Exception):
    """The answer is not one of a model hub: a captive portal's page, or a mistyped HF_ENDPOINT."""


def reason(error: Exception, filename: str) -> str:
    """Say in one clause why the hub does not give ``filename``."""
    host = urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set, and the cache in {constants.HF_HUB_CACHE} does not hold them"
        case NotAHubError():
            return f"what answers at {host} is no model hub (HF_ENDPOINT is {constants.ENDPOINT})"
        case EntryNotFoundError():
            return f"there is no {filename} on {host}, and other formats, which can run code, are not fetched"
        case HfHubHTTPError():
            return answers.reason_of_status(error.response.status_code, host)
    return answers.reason(error, host)
