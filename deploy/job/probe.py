"""Requests URLs, and exits with 0 if all of them respond with success, else with 1.

It is the health check of services whose images have no HTTP client.
"""

import sys
import urllib.request


def main(urls: list[str]) -> int:
    """Request each URL, up to the first failure."""
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=3):  # noqa: S310 - the URLs are those of docker-compose.yml
                pass
        except OSError as error:
            print(f"{url}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
