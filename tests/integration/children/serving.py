"""A process that serves the endpoint, and ends when standard input is closed.

Argument: the port.
"""

import sys

import tracedstore
from integration.harness import report

if __name__ == "__main__":
    tracedstore.configure(http_port=int(sys.argv[1]), log_format="off")
    report(serving=True)
    sys.stdin.read()
