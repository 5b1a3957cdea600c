"""Where engines are: one URL, or several with commas between them."""

from __future__ import annotations

from urllib.parse import urlsplit

from rollout.errors import BadConfig


def read_urls(text: str) -> list[str]:
    """The engines' URLs in `text`, in its order and without a slash at the end.

    Raises:
        BadConfig: one is empty, no URL of http or https, or stands there twice.
    """
    urls = [part.strip().rstrip("/") for part in text.split(",")]
    for url in urls:
        if not url:
            raise BadConfig(f"{text!r}: an engine's URL is empty")
        if not _is_http(url):
            raise BadConfig(f"{url!r} is no URL of an engine: want http://HOST:PORT, several with commas between them")
    twice = [url for place, url in enumerate(urls) if url.lower() in [other.lower() for other in urls[:place]]]
    if twice:
        raise BadConfig(f"{twice[0]} is given twice")
    return urls


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False
