"""Makes the Grafana dashboards: variables, targets, panels, one file a dashboard."""
