"""How telemetry leaves the process: settings, set-up, HTTP endpoint, shutdown."""
