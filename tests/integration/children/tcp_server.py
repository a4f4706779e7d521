"""Serve a TCPStore and report its port. Ends when standard input is closed."""

import sys

import torch.distributed as dist

from integration.harness import report

store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
report(port=store.port)
sys.stdin.read()
