"""Download a file: with a timeout, resumed where an earlier try stopped, and never half there under its own name."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 16


class DownloadError(Exception):
    """Why a download did not succeed, in a few words."""


def fetch(address: str, path: Path, progress: Callable[[int], None]) -> bool:
    """Download into `path`; say whether it began where an earlier try had stopped.

    What has arrived stays in PATH.part when the connection breaks, and the next call asks for the rest. A server that
    sends everything again is taken at its word.
    """
    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "sattle-dist"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            resumed = have > 0 and response.status == http.HTTPStatus.PARTIAL_CONTENT
            _receive(response, part, have if resumed else 0, progress)
    except urllib.error.HTTPError as error:
        if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # nothing of it is left to send: it was whole, or is of another file
            return fetch(address, path, progress)
        raise DownloadError(f"the server answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise DownloadError(str(getattr(error.reason, "strerror", None) or error.reason)) from None
    except (ValueError, http.client.InvalidURL) as error:
        raise DownloadError(str(error)) from None
    except (TimeoutError, http.client.HTTPException, ConnectionError) as error:
        raise DownloadError(f"the connection broke ({error or type(error).__name__}); try again to go on") from None
    part.rename(path)
    return resumed


def _receive(response: http.client.HTTPResponse, part: Path, have: int, progress: Callable[[int], None]) -> None:
    """Add the answer to what is there, and refuse one that ends early."""
    length = response.headers.get("Content-Length")
    expected = have + int(length) if length and length.isdecimal() else None
    with part.open("ab" if have else "wb") as file:
        while block := response.read(BLOCK):
            file.write(block)
            have += len(block)
            progress(have)
    if expected is not None and have < expected:
        raise ConnectionError(f"{have:,} of {expected:,} bytes arrived")
