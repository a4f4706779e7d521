"""Generates the Grafana dashboards: variables, targets, panels, one file each."""
