"""Weights from the Hugging Face hub, or within seconds the reason why not.

huggingface_hub's own downloads retry for most of a minute where nothing answers, so the hub is asked one short
question first. HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which reads them when it
is imported.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled

from normscope.errors import ModelError
from normscope.models.registry import embedded_models

DEADLINE = 3.0  # seconds for the hub's first answer, which takes less than one where all is well

logger = logging.getLogger(__name__)


def fetch(repo: str, filename: str) -> str:
    """Bring ``filename`` of ``repo`` into huggingface_hub's cache and return the commit it belongs to.

    Where the hub does not answer, the copy that is in the cache is taken, and a warning says so.

    Raises:
        ModelError: if it is neither on the hub nor in the cache.
    """
    cached = try_to_load_from_cache(repo, filename)
    failure = _ask(repo, filename)
    if failure is None:
        try:
            path = hf_hub_download(repo, filename)
        except Exception as error:  # of huggingface_hub, of its HTTP library, of the disk
            raise ModelError(
                f"The download of {filename} from {repo} broke off: {_first_line(error)}. {_ways_on()}"
            ) from error
    elif isinstance(cached, str):
        path = cached
        if not isinstance(failure, OfflineModeIsEnabled):
            logger.warning("%s is taken from the cache: %s.", repo, _reason(failure, filename))
    else:
        raise ModelError(
            f"The weights of {repo} cannot be had: {_reason(failure, filename)}. {_ways_on()}"
        ) from failure
    return Path(path).parent.name  # …/snapshots/<commit>/<filename>


def _ways_on() -> str:
    """Say what to do without a hub."""
    return (
        "Name a file with --weights FILE, take --weights random, or use an embedded model, which needs no "
        f"network: normscope plot {embedded_models()[0]}."
    )


def _ask(repo: str, filename: str) -> Exception | None:
    """Ask the hub for the file's metadata; return what went wrong.

    In a thread, because the timeouts of the HTTP library hold for each address that the host's name has, and do not
    hold for looking that name up.
    """
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            metadata = get_hf_file_metadata(hf_hub_url(repo, filename), timeout=DEADLINE)
            outcome.append(None if metadata.commit_hash else NotAHubError())
        except Exception as error:  # _reason() tells them apart, in the thread that can raise
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    return outcome[0] if outcome else TimeoutError()


class NotAHubError(Exception):
    """The answer is not one of a model hub: a captive portal's page, or a mistyped HF_ENDPOINT."""


def _reason(error: Exception, filename: str) -> str:
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
            return _reason_of_status(error.response.status_code, host)
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"the name of the hub, {host}, cannot be resolved"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return f"the hub at {host} refuses the connection"
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return f"the hub at {host} did not answer within {DEADLINE:g} s"
    return f"asking the hub at {host} failed with {_first_line(error)}"


def _reason_of_status(status: int, host: str) -> str:
    if status == 404:
        return f"{host} does not know them (status 404)"
    if status in (401, 403):
        return f"{host} does not give them to you (status {status}): they are private, gated, or not there"
    return f"{host} cannot serve them now (status {status})"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
