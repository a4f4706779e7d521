"""How telemetry leaves the process: settings, set-up and shutdown."""
