"""Ask for pages, and tell by the exit status whether all of them answer with success.

For containers whose images have nothing to ask with.
"""

import sys
import urllib.request


def main(urls: list[str]) -> int:
    """Ask for each."""
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=3):  # noqa: S310 - given by us
                pass
        except OSError as error:
            print(f"{url}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
