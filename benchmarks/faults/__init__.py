"""Injects faults into barriers and rendezvous, and judges what the survivors report.

`plan` makes a case from a seed and a number. `director` runs it with processes that
fork from one process, which has imported torch. `oracle` knows what was injected and
judges each result. `python -m faults --help` has the options.
"""
